"""Torch's side: quack, Liger, eager and compiled torch, in a process of their own, by CUDA events.

`python -m benchmarks` starts `python -m benchmarks.peers`, which never imports JAX: cases come as JSON lines on
standard input, each answered by one line on standard output. Protocol: the variants of a case interleave round-robin,
ten launches to a pair of events (short ones as a CUDA graph, so that the host's pace does not count), buffers rotated
as on JAX's side, and this process measures its own copy, so that shares of a copy compare across processes. A peer
that is not installed says so; none is silently missing. torch.compile is given static shapes, afresh for each case.

Of a loss, "value_and_grad" is what a library does in the fewest passes, so quack's kernel that writes the gradient of
the sum; "value_and_grad_mean" is the mean loss and its gradient by autograd. All but quack have one way for both.
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

_LOSSES = ("cross_entropy", "top_k")
_LIGER = {"label_smoothing": "label_smoothing", "z_loss": "lse_square_scale", "logits_soft_cap": "softcap"}
_LAUNCHES = 10
_GRAPHED_BYTES = 1 << 28
_ROOT = pathlib.Path(__file__).parents[1]


class Peers:
    """The process of `module` that measures `names`; `path` goes before PYTHONPATH there, where peers are installed."""

    def __init__(self, names: Sequence[str], rounds: int, path: str, module: str = "benchmarks.peers"):
        self._names = tuple(names)
        self._command = [sys.executable, "-m", module, ",".join(names), str(rounds)]
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
        self._child: subprocess.Popen | None = None

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The answer {"name", "copy", "impls"} to a case, described as in result files, with bytes and buffers."""
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
        return {"name": case["name"], "copy": None, "impls": {name: failed for name in self._names}}

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
            answer = {"copy": None, "impls": {name: {"status": "not installed", "reason": reason} for name in names}}
        else:
            answer = measure(torch, case, names, rounds)
        print(json.dumps({"name": case["name"], **answer}), file=answers, flush=True)


def _measure(torch: Any, case: Mapping[str, Any], names: Sequence[str], rounds: int) -> dict[str, Any]:
    impls, variants, prepared = {}, {}, {}
    operands = _operands(torch, case)
    for name in names:
        try:
            function, prepare = _peer(torch, name, case)
            prepared[name] = [prepare(*o) for o in operands]
            out = function(*prepared[name][0])
            impls[name] = {"status": "ok", "process": "torch", "max_error_ulp": _error(torch, case, operands[0], out)}
            variants[name] = lambda k, f=function, a=prepared[name]: f(*a[k])
        except ImportError as error:
            impls[name] = {"status": "not installed", "reason": str(error)}
        except Exception as error:  # peers refuse shapes in their own ways; the reason is part of the result
            impls[name] = {"status": "declined", "reason": f"{type(error).__name__}: {error}"[:300]}
        out = None
    variants["copy"] = _copy(torch, case)
    graphed = case["least_bytes"] <= _GRAPHED_BYTES
    bursts = {name: burst(torch, launch, case, graphed=graphed) for name, launch in variants.items()}
    times = interleaved(torch, bursts, rounds)
    copy = summary(times.pop("copy"))
    copy = {"method": "torch", "tb_per_s": case["copied_bytes"] / copy["us"] / 1e6, **copy}
    for name, samples in times.items():
        impls[name] |= summary(samples)
        impls[name]["tb_per_s"] = round(case["least_bytes"] / impls[name]["us"] / 1e6, 4)
        impls[name]["fraction_of_copy"] = round(impls[name]["tb_per_s"] / copy["tb_per_s"], 4)
    for held in (bursts, variants, prepared, operands):
        held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    return {"copy": copy, "impls": impls}


def _operands(torch: Any, case: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    shape, kind = (case["rows"], case["cols"]), {"device": "cuda", "dtype": getattr(torch, case["dtype"])}
    if case["op"] == "cross_entropy":
        return [(torch.randn(shape, **kind), _labels(torch, case)) for _ in range(case["buffers"])]
    arrays = 1 if case["pass"] in ("fwd", "call") else 2
    return [tuple(torch.randn(shape, **kind) for _ in range(arrays)) for _ in range(case["buffers"])]


def _copy(torch: Any, case: Mapping[str, Any]) -> Callable[[int], None]:
    elements = max(1, case["copied_bytes"] // 8)
    sources = [torch.empty(elements, dtype=torch.int32, device="cuda").random_() for _ in range(case["buffers"])]
    targets = [torch.empty_like(source) for source in sources]
    return lambda k: targets[k].copy_(sources[k])


def _peer(torch: Any, name: str, case: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """What to time, and how its arguments come from a case's operands."""
    if case["op"] in _LOSSES:
        return _loss_peer(torch, name, case)
    forward = _forward(torch, name, case["op"])
    if case["pass"] in ("fwd", "call"):
        return forward, lambda x: (x,)
    if case["pass"] == "value_and_vjp":

        def value_and_vjp(x, t):
            y = forward(x)
            return y, torch.autograd.grad(y, x, t)[0]

        return value_and_vjp, lambda x, t: (x.requires_grad_(), t)
    saved = getattr(torch, case["op"])
    return _backward(torch, name, case), lambda x, t: (saved(x, -1), t)


def _labels(torch: Any, case: Mapping[str, Any]) -> Any:
    """Random labels; with an `ignore_index`, every second row has that."""
    y = torch.randint(0, case["cols"], (case["rows"],), device="cuda")
    if "ignore_index" in case["options"]:
        y[::2] = case["options"]["ignore_index"]
    return y


def _loss_peer(
    torch: Any, name: str, case: Mapping[str, Any]
) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """What to time, and how its arguments come from a case's operands: copies, as Liger writes over the logits."""
    if case["op"] == "top_k":
        return _top_k(torch, name, case["options"]["k"]), lambda x: (x,)
    loss = _loss(torch, name, case)
    if name == "quack" and case["pass"] == "value_and_grad":
        return _quack_in_one, lambda x, y: (x, y)
    if case["pass"] == "fwd":
        return lambda x, y: loss(x, y, reduction="none"), lambda x, y: (x.clone(), y)

    def value_and_grad(x, y):
        value = loss(x, y, reduction="mean")
        return value, torch.autograd.grad(value, x)[0]

    return value_and_grad, lambda x, y: (x.clone().requires_grad_(), y)


def _top_k(torch: Any, name: str, k: int) -> Callable[..., Any]:
    if name not in ("torch", "torch_compile"):
        raise NotImplementedError(f"{name} has no top-k softmax of such rows")
    select = lambda x: torch.topk(torch.softmax(x, -1), k)
    return select if name == "torch" else torch.compile(select, dynamic=False)


def _quack_in_one(x, y):
    losses, gradient = importlib.import_module("quack.cross_entropy").cross_entropy_fwd(x, y, return_dx=True)
    return losses.sum(), gradient


def _loss(torch: Any, name: str, case: Mapping[str, Any]) -> Callable[..., Any]:
    options = {key: value for key, value in case["options"].items() if key != "ignore_index"}  # -100 is everyone's
    if name == "liger":
        function = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
        named = {_LIGER[key]: value for key, value in options.items()}
        return lambda x, y, reduction: function(x, y, reduction=reduction, **named)
    if options:
        raise NotImplementedError(f"{name} has no {', '.join(options)} together")
    if name == "quack":
        module = importlib.import_module("quack.cross_entropy")
        if case["pass"] == "fwd":
            return lambda x, y, reduction: module.cross_entropy_fwd(x, y)
        return module.cross_entropy
    function = torch.nn.functional.cross_entropy
    return function if name == "torch" else torch.compile(function, dynamic=False)


def _forward(torch: Any, name: str, op: str) -> Callable[[Any], Any]:
    eager = getattr(torch, op)
    if name == "torch":
        return lambda x: eager(x, -1)
    if name == "torch_compile":
        return torch.compile(lambda x: eager(x, -1), dynamic=False)
    if op != "softmax":
        raise NotImplementedError(f"{name} has no {op}")
    if name == "quack":
        return importlib.import_module("quack.softmax").softmax
    return importlib.import_module("liger_kernel.transformers.functional").liger_softmax


def _backward(torch: Any, name: str, case: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """(saved output, cotangent) to gradient."""
    dtype = getattr(torch, case["dtype"])
    eager = {"softmax": torch.ops.aten._softmax_backward_data, "log_softmax": torch.ops.aten._log_softmax_backward_data}
    if name == "torch":
        return lambda y, t: eager[case["op"]](t, y, -1, dtype)
    if name == "torch_compile" and case["op"] == "softmax":

        def backward(y, t):
            y32, t32 = y.float(), t.float()
            return (y32 * (t32 - (y32 * t32).sum(-1, keepdim=True))).to(t.dtype)

        return torch.compile(backward, dynamic=False)
    if name == "quack" and case["op"] == "softmax":
        quack_backward = importlib.import_module("quack.softmax").softmax_bwd
        return lambda y, t: quack_backward(t, y)
    raise NotImplementedError(f"{name} has no separate backward of {case['op']}")


def burst(torch: Any, launch: Callable[[int], Any], case: Mapping[str, Any], *, graphed: bool) -> Callable[[], None]:
    """`_LAUNCHES` launches, outputs kept alive as long as inputs rotate; `graphed` as a CUDA graph where possible."""

    def launches() -> None:
        alive = collections.deque(maxlen=case["buffers"])
        for k in range(_LAUNCHES):
            alive.append(launch(k % case["buffers"]))

    if not graphed:
        return launches
    try:
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
    except RuntimeError as error:
        print(f"{case['name']}: launched one by one, no CUDA graph: {error}", file=sys.stderr)
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
    """Median, extremes and percentiles."""
    import numpy as np

    p20, p50, p80 = np.percentile(samples, (20, 50, 80)).round(3).tolist()
    low, high = round(min(samples), 3), round(max(samples), 3)
    return {"us": p50, "min_us": low, "max_us": high, "p20_us": p20, "p80_us": p80, "rounds": len(samples)}


def _error(torch: Any, case: Mapping[str, Any], operands: Sequence[Any], out: Any) -> float | None:
    """The error of the first and last rows, measured as ours is; None for gradients and selections."""
    if case["pass"] not in ("fwd", "call") or case["op"] == "top_k":
        return None
    from benchmarks.verdict import errors, oracle

    ends = [0, -1]
    x = _to_numpy(torch, operands[0][ends])
    if case["op"] == "cross_entropy":
        names = {"label_smoothing": "smoothing", "logits_soft_cap": "soft_cap", "ignore_index": "ignored"}
        options = {names.get(key) or key: value for key, value in case["options"].items()}
        true = oracle.cross_entropy(x, _to_numpy(torch, operands[1][ends]), **options)
        truth, size = true.loss, true.loss_terms + abs(true.lse)
    else:
        truth, size = getattr(oracle, case["op"])(x, -1), None
    if case["op"] == "log_softmax":
        size = oracle.log_softmax_terms(x, -1)
    return round(errors.max_error(_to_numpy(torch, out.detach()[ends]), truth, magnitude=size), 4)


def _to_numpy(torch: Any, tensor: Any) -> Any:
    """NumPy knows bfloat16 by name once the oracle has imported ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).cpu().numpy().view("bfloat16")
    return tensor.cpu().numpy()


if __name__ == "__main__":
    serve(_measure, sys.argv[1].split(","), int(sys.argv[2]))
