"""The committed evidence: result files, and the newest measurement of each case among them."""

import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks import attention_peers, peers, report

FOLDER = pathlib.Path(__file__).parent / "results"
CARD = "h200"  # the folder of the card that every table but attention's is about
RUNG = "rung:"
_TORCH = (*peers.NAMES, *attention_peers.NAMES)
NOT_MEASURED = f"*Not measured yet: no result file under `benchmarks/results/{CARD}/` has these cases.*"


class Setting(NamedTuple):
    """A card and a version of JAX, as result files name them; results of two settings are never mixed."""

    card: str
    jax: str

    def __str__(self) -> str:
        return f"{self.card}, JAX {self.jax}"

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.jax)))


class Results:
    """What result files of one topic say, newest first by each file's own timestamp.

    `folder` has a folder for each card. Without a `setting` the files of `CARD` count, and with one those that were
    measured in it, wherever they lie.
    """

    def __init__(self, folder: pathlib.Path = FOLDER, topic: str | None = None, setting: Setting | None = None):
        self._folder, self._topic = folder, topic
        files = _newest_first(folder, "*" if setting else CARD, topic)
        self._files = [file for file in files if setting is None or _setting(file) == setting]
        # Torch's side has no JAX in its process, so that its times belong to the card alone.
        self._same_card = [file for file in files if setting is None or _setting(file).card == setting.card]

    def __bool__(self) -> bool:
        return bool(self._files)

    def about(self, topic: str) -> "Results":
        """What the same folder says of another topic, on the same card."""
        return Results(self._folder, topic)

    def by_setting(self, topic: str) -> dict[Setting, "Results"]:
        """What the same folder says of a topic in each setting that has measured "ours", the newest JAX first."""
        found = {_setting(file) for file in _newest_first(self._folder, "*", topic)}
        order = sorted(found, key=lambda setting: (setting.version, setting.card), reverse=True)
        each = {setting: Results(self._folder, topic, setting) for setting in order}
        return {setting: results for setting, results in each.items() if results.records()}

    def case(self, name: str) -> dict[str, Any] | None:
        """The newest run of "ours" on a case, with XLA if there is one, and the newest of torch's side beside it.

        Peers of attention that only another run had stand beside it with the matrix product of theirs.
        """
        ours = self.runs(name)
        found = next((record for record in ours if "xla" in record["impls"]), ours[0] if ours else None)
        if found is None:
            return None
        is_torch = lambda impl: impl in _TORCH
        torch_records = itertools.chain(*(_with(files, name, is_torch) for files in (self._files, self._same_card)))
        beside = next(torch_records, {"impls": {}})
        product = {} if beside is found or not beside.get("peers_matmul") else _product(beside["peers_matmul"])
        torchs = {impl: entry | product for impl, entry in beside["impls"].items() if impl in _TORCH}
        return found | {"impls": _of_earlier_runs(ours) | found["impls"] | torchs}

    def runs(self, name: str) -> list[dict[str, Any]]:
        """Every run of "ours" on a case, the newest first."""
        return list(_with(self._files, name, lambda impl: impl == "ours"))

    def rungs(self, name: str) -> dict[str, Any] | None:
        """The newest run of single rungs on a case."""
        return next(_with(self._files, name, lambda impl: impl.startswith(RUNG)), None)

    def headers(self) -> list[Mapping[str, Any]]:
        return [file["header"] for file in self._files]

    def records(self) -> list[dict[str, Any]]:
        """Every case with "ours", once, in the order of the files."""
        names = dict.fromkeys(r["case"]["name"] for file in self._files for r in file["records"])
        return [record for record in map(self.case, names) if record is not None]


def _newest_first(folder: pathlib.Path, card: str, topic: str | None) -> list[dict[str, Any]]:
    files = (report.read(path) for path in sorted(folder.glob(f"{card}/*.json")))
    files = (file for file in files if file["header"].get("topic") == topic)
    files = ({**file, "records": [r | {"run": _run(file["header"])} for r in file["records"]]} for file in files)
    return sorted(files, key=lambda file: file["header"]["timestamp"], reverse=True)


def _with(files: list[dict[str, Any]], name: str, wanted: Any) -> Iterator[dict[str, Any]]:
    for file in files:
        for record in file["records"]:
            if record["case"]["name"] == name and any(map(wanted, record["impls"])):
                yield record


def _setting(file: Mapping[str, Any]) -> Setting:
    return Setting(file["header"]["device"]["name"], file["header"]["versions"]["jax"])


def _run(header: Mapping[str, Any]) -> dict[str, Any]:
    """On which day a record was measured, of which commit, and with what."""
    when = f"{header['timestamp'][:10]} {str(header['commit'])[:12]}"
    return {"when": when, "commit": header["commit"], "device": header["device"], "versions": header["versions"]}


def _product(matmul: Mapping[str, Any]) -> dict[str, Any]:
    return {"matmul_tflop_per_s": matmul["tflop_per_s"]}


def _of_earlier_runs(newest_first: list[dict[str, Any]]) -> dict[str, Any]:
    products = [(r["impls"], _product(r["matmul"])) for r in reversed(newest_first) if "matmul" in r]
    timed = ((name, entry, product) for impls, product in products for name, entry in impls.items() if "us" in entry)
    return {name: entry | product for name, entry, product in timed}
