"""The committed evidence: result files, and the newest measurement of each case among them."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import attention_peers, peers, report

FOLDER = pathlib.Path(__file__).parent / "results" / "h200"
RUNG = "rung:"
_TORCH = (*peers.NAMES, *attention_peers.NAMES)
NOT_MEASURED = "*Not measured yet: no result file under `benchmarks/results/h200/` has these cases.*"


class Results:
    """What a folder of result files says, newest first by each file's own timestamp; of one topic."""

    def __init__(self, folder: pathlib.Path = FOLDER, topic: str | None = None):
        self._folder = folder
        files = (report.read(path) for path in sorted(folder.glob("*.json")))
        files = (file for file in files if file["header"].get("topic") == topic)
        files = ({**file, "records": [r | {"run": _run(file["header"])} for r in file["records"]]} for file in files)
        self._files = sorted(files, key=lambda file: file["header"]["timestamp"], reverse=True)

    def __bool__(self) -> bool:
        return bool(self._files)

    def about(self, topic: str) -> "Results":
        """What the same folder says of another topic."""
        return Results(self._folder, topic)

    def case(self, name: str) -> dict[str, Any] | None:
        """The newest run of "ours" on a case, with XLA if there is one, and the newest of torch's side beside it.

        Peers of attention that only another run had stand beside it with the matrix product of theirs.
        """
        ours = list(self._with(name, lambda impl: impl == "ours"))
        found = next((record for record in ours if "xla" in record["impls"]), ours[0] if ours else None)
        if found is None:
            return None
        beside = next(self._with(name, lambda impl: impl in _TORCH), {"impls": {}})
        product = {} if beside is found or not beside.get("peers_matmul") else _product(beside["peers_matmul"])
        torchs = {impl: entry | product for impl, entry in beside["impls"].items() if impl in _TORCH}
        return found | {"impls": _of_earlier_runs(ours) | found["impls"] | torchs}

    def rungs(self, name: str) -> dict[str, Any] | None:
        """The newest run of single rungs on a case."""
        return next(self._with(name, lambda impl: impl.startswith(RUNG)), None)

    def headers(self) -> list[Mapping[str, Any]]:
        return [file["header"] for file in self._files]

    def records(self) -> list[dict[str, Any]]:
        """Every case with "ours", once, in the order of the files."""
        names = dict.fromkeys(r["case"]["name"] for file in self._files for r in file["records"])
        return [record for record in map(self.case, names) if record is not None]

    def _with(self, name: str, wanted: Any) -> Iterator[dict[str, Any]]:
        for file in self._files:
            for record in file["records"]:
                if record["case"]["name"] == name and any(map(wanted, record["impls"])):
                    yield record


def _run(header: Mapping[str, Any]) -> dict[str, Any]:
    """On which day a record was measured, of which commit, and with what."""
    when = f"{header['timestamp'][:10]} {str(header['commit'])[:12]}"
    return {"when": when, "device": header["device"], "versions": header["versions"]}


def _product(matmul: Mapping[str, Any]) -> dict[str, Any]:
    return {"matmul_tflop_per_s": matmul["tflop_per_s"]}


def _of_earlier_runs(newest_first: list[dict[str, Any]]) -> dict[str, Any]:
    products = [(r["impls"], _product(r["matmul"])) for r in reversed(newest_first) if "matmul" in r]
    timed = ((name, entry, product) for impls, product in products for name, entry in impls.items() if "us" in entry)
    return {name: entry | product for name, entry, product in timed}
