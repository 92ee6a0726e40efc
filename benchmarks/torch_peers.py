"""Torch's side: torch, quack, Liger and flash-attn-4, in a process of their own, by CUDA events.

`python -m benchmarks` starts `python -m benchmarks.torch_peers`, which never imports JAX: cases come as JSON lines on
standard input, each answered by one line on standard output. The programs of a case, from `benchmarks.torch_calls`,
interleave round-robin, ten launches to a pair of events (short ones as a CUDA graph, so that the host's pace does not
count), with buffers rotated as on JAX's side. This process measures its own copy or matrix product, so that shares
of it compare across processes. A peer that is not installed says so; none is silently missing.
"""

import collections
import gc
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import torch_calls

_LAUNCHES = 10
_ROOT = pathlib.Path(__file__).parents[1]


class Peers:
    """The process that measures `names`; `path` goes before PYTHONPATH there, where peers are installed."""

    def __init__(self, names: Sequence[str], rounds: int, path: str, module: str = __name__):
        self._names = tuple(names)
        self._command = [sys.executable, "-m", module, ",".join(names), str(rounds)]
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
        self._child: subprocess.Popen | None = None

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a case, as `measure` has it: `told` of a case is what the process is told."""
        if self._child is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._child = subprocess.Popen(self._command, env=self._env, cwd=_ROOT, **pipes)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(case) + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        self.close()
        failed = {"status": "failed", "reason": "the peers' process died; its last words are above"}
        return {"name": case["name"], "impls": {name: failed for name in self._names}}

    def close(self) -> None:
        """Ends the process; the next case starts another."""
        if self._child is not None:
            child, self._child = self._child, None
            child.communicate()


def serve(measure: Callable[..., dict[str, Any]], names: Sequence[str], rounds: int) -> None:
    """Answers cases from standard input by `measure`; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is written below Python, too
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        torch = None
    for text in sys.stdin:
        case = json.loads(text)
        if torch is None or not torch.cuda.is_available():
            reason = "torch" if torch is None else "a GPU for torch"
            answer = {"impls": {name: {"status": "not installed", "reason": reason} for name in names}}
        else:
            answer = measure(torch, case, names, rounds)
        print(json.dumps({"name": case["name"], **answer}), file=answers, flush=True)


def measure(torch: Any, case: Mapping[str, Any], names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Checks and times a case: {"impls": an entry for each name, "copy" or "matmul": this process's own}."""
    call = (torch_calls.AttentionCall if "kind" in case else torch_calls.RowCall)(torch, case)
    impls, launches = {}, {}
    for name in names:
        impls[name], programs = _checked(call, name)
        launches |= {f"{name}:{program}": launch for program, launch in programs.items()}
    launches[call.ceiling] = call.probe()
    bursts = {name: burst(torch, launch, call, graphed=call.graphed(name)) for name, launch in launches.items()}
    times = {name: summary(samples) for name, samples in interleaved(torch, bursts, rounds).items()}
    probe = call.rate(times.pop(call.ceiling))
    for name, entry in impls.items():
        if entry["status"] == "ok":
            mine = {key.partition(":")[2]: found for key, found in times.items() if key.startswith(f"{name}:")}
            entry |= call.speeds(mine, probe)
    for held in (bursts, launches, call.__dict__):
        held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    return {call.ceiling: probe, "impls": impls}


def _checked(call: torch_calls.RowCall | torch_calls.AttentionCall, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known of a peer before it is timed, and what to time if it is right."""
    try:
        entry, programs = call.checked(name)
    except ImportError as error:
        return {"status": "not installed", "reason": str(error)}, {}
    except Exception as error:  # peers refuse shapes in their own ways; the reason is part of the result
        status = "declined" if isinstance(error, call.refusals) else "failed"
        return {"status": status, "reason": f"{type(error).__name__}: {error}"[:300]}, {}
    return {"process": "torch"} | entry, programs if entry["status"] == "ok" else {}


def burst(torch: Any, launch: Callable[[int], Any], call: Any, *, graphed: bool) -> Callable[[], None]:
    """`_LAUNCHES` launches, outputs kept alive as long as inputs rotate; `graphed` as a CUDA graph where possible."""

    def launches() -> None:
        alive = collections.deque(maxlen=call.buffers)
        for k in range(_LAUNCHES):
            alive.append(launch(k % call.buffers))

    if not graphed:
        return launches
    try:
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
    except RuntimeError as error:
        print(f"{call.case['name']}: launched one by one, no CUDA graph: {error}", file=sys.stderr)
        return launches
    return graph.replay


def interleaved(torch: Any, bursts: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per launch, one number for each round."""
    times = {name: [] for name in bursts}
    names = list(bursts)
    for r in range(-1, rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            bursts[name]()
            end.record()
            torch.cuda.synchronize()
            if r >= 0:
                times[name].append(1e3 * start.elapsed_time(end) / _LAUNCHES)
    return times


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and percentiles over rounds, and each round."""
    import numpy as np

    p20, p50, p80 = np.percentile(samples, (20, 50, 80)).round(3).tolist()
    rounds = {"rounds": len(samples), "rounds_us": [round(us, 3) for us in samples]}
    low, high = round(min(samples), 3), round(max(samples), 3)
    return {"us": p50, "min_us": low, "max_us": high, "p20_us": p20, "p80_us": p80, **rounds}


if __name__ == "__main__":
    serve(measure, sys.argv[1].split(","), int(sys.argv[2]))
