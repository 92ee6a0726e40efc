"""Torch's side: torch, quack, Liger and flash-attn-4, in a process of their own, by CUDA events.

`python -m benchmarks` starts `python -m benchmarks.torch_peers`, which never imports JAX: cases come as JSON lines on
standard input, each answered by one line on standard output. The programs of a case interleave round-robin, ten
launches to a pair of events (short ones as a CUDA graph, so that the host's pace does not count), with buffers rotated
as on JAX's side. This process measures its own copy or matrix product, so that shares of it compare across processes.
Of a loss, "value_and_grad" is what a library does in the fewest passes, so quack's kernel that writes the gradient of
the sum; "value_and_grad_mean" is the mean loss and its gradient by autograd. torch.compile is given static shapes,
afresh for each case. Attention is judged as `benchmarks.check` judges, and timed as on JAX's side.
"""

import collections
import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import results as measured

_LAUNCHES = 10
_LIGER = "liger_kernel.transformers.functional"
_LIGER_OPTIONS = {"label_smoothing": "label_smoothing", "z_loss": "lse_square_scale", "logits_soft_cap": "softcap"}
_GRAPHED_BYTES = 1 << 28
_MATMUL_SIZE = 8192

Case = dict[str, Any]
Attend = Callable[[Any, Any, Any], Any]


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


def measure(torch: Any, case: Case, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Checks and times a case: {"impls": an entry for each name, "copy" or "matmul": this process's own}."""
    torch.manual_seed(0)
    call = (AttentionCall if "kind" in case else RowCall)(torch, case)
    impls, launches = {}, {}
    for name in names:
        impls[name], programs = _checked(call, name)
        launches |= {f"{name}:{program}": launch for program, launch in programs.items()}
    launches[call.ceiling] = call.probe()
    bursts = {name: burst(torch, launch, call, graphed=call.graphed(name)) for name, launch in launches.items()}
    times = {
        name: measured.summary(samples) | {"rounds": rounds, "rounds_us": [round(us, 3) for us in samples]}
        for name, samples in interleaved(torch, bursts, rounds).items()
    }
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


def _checked(call: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known of a peer before it is timed, and what to time if it is right."""
    try:
        entry, programs = call.checked(name)
    except Exception as error:  # peers refuse shapes in their own ways; the reason is part of the result
        if isinstance(error, ImportError):
            return {"status": "not installed", "reason": str(error)}, {}
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


class RowCall:
    """A case of softmax or a loss, described as in result files, with bytes and buffers."""

    ceiling, refusals = "copy", (Exception,)

    def __init__(self, torch: Any, case: Case):
        self.torch, self.case, self.buffers = torch, case, case["buffers"]
        self.operands = _row_operands(torch, case)

    def checked(self, name: str) -> tuple[dict[str, Any], dict[str, Callable[[int], Any]]]:
        """What is known of a peer, and what to time."""
        function, prepare = _peer(self.torch, name, self.case)
        prepared = [prepare(*operands) for operands in self.operands]
        error = _row_error(self.torch, self.case, self.operands[0], function(*prepared[0]))
        return {"status": "ok", "max_error_ulp": error}, {"": lambda k: function(*prepared[k])}

    def probe(self) -> Callable[[int], Any]:
        """The copy of the same bytes."""
        elements = max(1, self.case["copied_bytes"] // 8)
        facts = {"dtype": self.torch.int32, "device": "cuda"}
        sources = [self.torch.empty(elements, **facts).random_() for _ in range(self.buffers)]
        targets = [self.torch.empty_like(source) for source in sources]
        return lambda k: targets[k].copy_(sources[k])

    def graphed(self, name: str) -> bool:
        return self.case["least_bytes"] <= _GRAPHED_BYTES

    def rate(self, probe: dict[str, Any]) -> dict[str, Any]:
        return {"method": "torch", "tb_per_s": self.case["copied_bytes"] / probe["us"] / 1e6, **probe}

    def speeds(self, times: Mapping[str, dict[str, Any]], probe: Mapping[str, Any]) -> dict[str, Any]:
        """The time, the bandwidth of the least traffic, and its share of the copy's."""
        (taken,) = times.values()
        speed = round(self.case["least_bytes"] / taken["us"] / 1e6, 4)
        return taken | {"tb_per_s": speed, "fraction_of_copy": round(speed / probe["tb_per_s"], 4)}


class AttentionCall:
    """A case of attention, described as in result files, with its flops and the lengths of its documents."""

    ceiling, buffers = "matmul", 1
    refusals = (AssertionError, NotImplementedError, TypeError, ValueError)

    def __init__(self, torch: Any, case: Case):
        self.torch, self.case = torch, case | {"queries": case["queries"] or case["length"]}
        self.operands = _attention_operands(torch, self.case)
        self.truths = _truths(torch, self.case, self.operands)

    def checked(self, name: str) -> tuple[dict[str, Any], dict[str, Callable[[int], Any]]]:
        """What is known of flash-attn-4, and what to time if it is right."""
        attend, version = _fa4(self.torch, self.case)
        programs = _programs(self.torch, attend, self.operands, self.case["pass"])
        verdicts = [_judge(self.torch, self.case, program(), self.truths) for program in programs.values()]
        launches = {name: lambda _, program=program: program() for name, program in programs.items()}
        return measured.worst(verdicts).entry() | {"version": version}, launches

    def probe(self) -> Callable[[int], Any]:
        """A large matrix product."""
        self.truths.clear()
        shape, kind = (_MATMUL_SIZE, _MATMUL_SIZE), {"device": "cuda", "dtype": self.torch.bfloat16}
        a, b = (self.torch.randn(shape, **kind) for _ in range(2))
        return lambda _: self.torch.matmul(a, b)

    def graphed(self, name: str) -> bool:
        return not name.endswith(":direct")  # which belongs to the stream of its forward pass

    def rate(self, probe: dict[str, Any]) -> dict[str, Any]:
        return probe | {"size": _MATMUL_SIZE, "tflop_per_s": round(2 * _MATMUL_SIZE**3 / probe["us"] / 1e6, 2)}

    def speeds(self, times: Mapping[str, dict[str, Any]], probe: Mapping[str, Any]) -> dict[str, Any]:
        return measured.speeds(self.case["pass"], times, self.case["flops"])


def _row_operands(torch: Any, case: Case) -> list[tuple[Any, ...]]:
    """Logits, and random labels or a cotangent."""
    shape, kind = (case["rows"], case["cols"]), {"device": "cuda", "dtype": getattr(torch, case["dtype"])}
    second = lambda: _labels(torch, case) if case["op"] == "cross_entropy" else torch.randn(shape, **kind)
    alone = case["op"] != "cross_entropy" and case["pass"] in ("fwd", "call")
    return [(torch.randn(shape, **kind), *([] if alone else [second()])) for _ in range(case["buffers"])]


def _labels(torch: Any, case: Case) -> Any:
    """Random labels; with an `ignore_index`, every second row has that."""
    y = torch.randint(0, case["cols"], (case["rows"],), device="cuda")
    if "ignore_index" in case["options"]:
        y[::2] = case["options"]["ignore_index"]
    return y


def _peer(torch: Any, name: str, case: Case) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """What to time, and how its arguments come from a case's operands: copies of logits that Liger writes over."""
    if case["op"] == "top_k":
        if name not in ("torch", "torch_compile"):
            raise NotImplementedError(f"{name} has no top-k softmax of such rows")
        select = lambda x: torch.topk(torch.softmax(x, -1), case["options"]["k"])
        return _compiled(torch, name, select), lambda x: (x,)
    if case["op"] == "cross_entropy":
        loss = _loss(torch, name, case)
        if name == "quack" and case["pass"] == "value_and_grad":
            return loss, lambda x, y: (x, y)
        if case["pass"] == "fwd":
            return lambda x, y: loss(x, y, reduction="none"), lambda x, y: (x.clone(), y)

        def value_and_grad(x, y):
            value = loss(x, y, reduction="mean")
            return value, torch.autograd.grad(value, x)[0]

        return value_and_grad, lambda x, y: (x.clone().requires_grad_(), y)
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


def _compiled(torch: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if name == "torch_compile" else function


def _loss(torch: Any, name: str, case: Case) -> Callable[..., Any]:
    options = {key: value for key, value in case["options"].items() if key != "ignore_index"}  # -100 is everyone's
    if name == "liger":
        function = importlib.import_module(_LIGER).liger_cross_entropy
        named = {_LIGER_OPTIONS[key]: value for key, value in options.items()}
        return lambda x, y, reduction: function(x, y, reduction=reduction, **named)
    if options:
        raise NotImplementedError(f"{name} has no {', '.join(options)} together")
    if name != "quack":
        return _compiled(torch, name, torch.nn.functional.cross_entropy)
    module = importlib.import_module("quack.cross_entropy")
    if case["pass"] == "fwd":
        return lambda x, y, reduction: module.cross_entropy_fwd(x, y)
    if case["pass"] == "value_and_grad_mean":
        return module.cross_entropy

    def in_one(x, y):
        losses, gradient = module.cross_entropy_fwd(x, y, return_dx=True)
        return losses.sum(), gradient

    return in_one


def _forward(torch: Any, name: str, op: str) -> Callable[[Any], Any]:
    if name in ("torch", "torch_compile"):
        eager = getattr(torch, op)
        return _compiled(torch, name, lambda x: eager(x, -1))
    if op != "softmax":
        raise NotImplementedError(f"{name} has no {op}")
    module, function = {"quack": ("quack.softmax", "softmax"), "liger": (_LIGER, "liger_softmax")}[name]
    return getattr(importlib.import_module(module), function)


def _backward(torch: Any, name: str, case: Case) -> Callable[[Any, Any], Any]:
    """(saved output, cotangent) to gradient."""
    eager = {"softmax": torch.ops.aten._softmax_backward_data, "log_softmax": torch.ops.aten._log_softmax_backward_data}
    if name == "torch":
        return lambda y, t: eager[case["op"]](t, y, -1, getattr(torch, case["dtype"]))
    if name == "torch_compile" and case["op"] == "softmax":

        def backward(y, t):
            y32, t32 = y.float(), t.float()
            return (y32 * (t32 - (y32 * t32).sum(-1, keepdim=True))).to(t.dtype)

        return torch.compile(backward, dynamic=False)
    if name == "quack" and case["op"] == "softmax":
        quack_backward = importlib.import_module("quack.softmax").softmax_bwd
        return lambda y, t: quack_backward(t, y)
    raise NotImplementedError(f"{name} has no separate backward of {case['op']}")


def _row_error(torch: Any, case: Case, operands: Sequence[Any], out: Any) -> float | None:
    """The error of the first and last rows, measured as ours is; None for gradients and selections."""
    if case["pass"] not in ("fwd", "call") or case["op"] == "top_k":
        return None
    x = _to_numpy(torch, operands[0][[0, -1]])
    if case["op"] == "cross_entropy":
        names = {"label_smoothing": "smoothing", "logits_soft_cap": "soft_cap", "ignore_index": "ignored"}
        options = {names.get(key) or key: value for key, value in case["options"].items()}
        true = measured.oracle.cross_entropy(x, _to_numpy(torch, operands[1][[0, -1]]), **options)
        truth, size = true.loss, true.loss_terms + abs(true.lse)
    else:
        truth, size = getattr(measured.oracle, case["op"])(x, -1), None
    if case["op"] == "log_softmax":
        size = measured.oracle.log_softmax_terms(x, -1)
    return round(measured.errors.max_error(_to_numpy(torch, out.detach()[[0, -1]]), truth, magnitude=size), 4)


def _to_numpy(torch: Any, tensor: Any) -> Any:
    """NumPy knows bfloat16 by name once the oracle has imported ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).cpu().numpy().view("bfloat16")
    return tensor.cpu().numpy()


def _attention_operands(torch: Any, case: Case) -> list[Any]:
    """Query, key, value and the cotangent, random normal."""
    b, t, s, n, k = case["batch"], case["queries"], case["length"], case["heads"], case["key_heads"]
    d, v = case["head_dim"], case["value_dim"]
    shapes = [(b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)]
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, case["dtype"])) for shape in shapes]


def _fa4(torch: Any, case: Case) -> tuple[Attend, str]:
    """The call, and the package's version; documents are sequences of their own lengths."""
    if case["kind"] in ("mask", "causal_mask", "bias"):
        raise NotImplementedError("flash-attn-4 takes such tensors only by a function compiled into its kernel")
    if case["queries"] != case["length"] and case["kind"] != "full":
        raise NotImplementedError("flash-attn-4 lets the last query see the last key, and not the first the first")
    module = importlib.import_module("flash_attn.cute.interface")
    version = importlib.metadata.version("flash-attn-4")
    if case["kind"] == "documents":
        ends = [0, *itertools.accumulate(case["documents"] * case["batch"])]
        ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
        longest = max(case["documents"])
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def packed(query: Any, key: Any, value: Any) -> Any:
            flat = [x.reshape((-1, *x.shape[2:])) for x in (query, key, value)]
            out = module.flash_attn_varlen_func(*flat, causal=True, **lengths)[0]
            return out.reshape((*query.shape[:-1], value.shape[-1]))

        return packed, version
    options = {"window_size": (case["span"] - 1, 0)} if case["kind"] == "window" else {"causal": case["kind"] != "full"}
    return lambda query, key, value: module.flash_attn_func(query, key, value, **options)[0], version


def _programs(torch: Any, attend: Attend, operands: Sequence[Any], pass_: str) -> dict[str, Callable[[], Any]]:
    *inputs, d_out = operands
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def value_and_vjp() -> Any:
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, d_out)

    forward = lambda: (attend(*inputs),)
    if pass_ != "bwd":
        return {"fwd": {"fwd": forward}, "value_and_vjp": {"value_and_vjp": value_and_vjp}}[pass_]
    saved = attend(*leaves)
    direct = lambda: torch.autograd.grad(saved, leaves, d_out, retain_graph=True)
    return {"fwd": forward, "value_and_vjp": value_and_vjp, "direct": direct}


def _by_pair(case: Case, x: Any) -> list[Any]:
    """For each sequence and key head `[heads, length, dim]`: the key head, or the query heads that share it."""
    group = x.shape[2] // case["key_heads"]
    return [of[:, i : i + group].swapaxes(0, 1) for of in x for i in range(0, x.shape[2], group)]


def _truths(torch: Any, case: Case, operands: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """For each output, by sequence and key head, it in float32, and with every array rounded to 16 bits."""
    seen, found = _seen(torch, case), []
    for arrays in zip(*(_by_pair(case, x) for x in operands), strict=True):
        mine = [x.float() for x in arrays]
        exact = _attention(torch, seen, mine, lambda x: x)
        plain = _attention(torch, seen, mine, lambda x: x.to(getattr(torch, case["dtype"])).float())
        found.append((exact, plain))
    return {name: ([x[name] for x, _ in found], [x[name] for _, x in found]) for name in measured.NAMES[4]}


def _attention(torch: Any, seen: Any, operands: Sequence[Any], rounded: Callable[[Any], Any]) -> dict[str, Any]:
    """Attention of one key head and its gradients, by their formulas."""
    query, key, value, d_out = operands
    scale = 1 / math.sqrt(query.shape[-1])
    weights = torch.softmax(torch.where(seen, query @ key.mT * scale, -math.inf), -1)
    d_weights = d_out @ value.mT
    d_logits = rounded(weights * (d_weights - (weights * d_weights).sum(-1)[..., None]))
    weights = rounded(weights)
    return {
        "out": rounded(weights @ value),
        "d_query": rounded(d_logits @ key * scale),
        "d_key": rounded((d_logits.mT @ query).sum(0)[None] * scale),
        "d_value": rounded((weights.mT @ d_out).sum(0)[None]),
    }


def _seen(torch: Any, case: Case) -> Any:
    """Which keys each query sees, `[queries, keys]`."""
    at, queries = (torch.arange(n, device="cuda") for n in (case["length"], case["queries"]))
    query, key = queries[:, None], at[None, :]
    if case["kind"] in ("full", "mask", "bias"):
        return (key >= 0) & (query >= 0)
    seen = key <= query
    if case["kind"] == "window":
        return seen & (query - key < case["span"])
    if case["kind"] == "documents":
        starts = torch.tensor(list(itertools.accumulate(case["documents"]))[:-1], device="cuda")
        document = (at[:, None] >= starts).sum(-1)
        seen = seen & (document[:, None] == document[None, :])
    return seen


def _judge(torch: Any, case: Case, got: Sequence[Any], truths: Mapping[str, tuple[Any, Any]]) -> Any:
    def errors(output: Any, exact: Sequence[Any], plain: Sequence[Any]) -> list[Any]:
        mine = [x.detach().float() for x in _by_pair(case, output)]
        found = [torch.stack([_error(torch, *x) for x in zip(kind, exact, strict=True)]) for kind in (mine, plain)]
        return [x.reshape((case["batch"], -1)).tolist() for x in found]

    named = zip(measured.NAMES[len(got)], got, strict=True)
    return measured.worst_head({name: errors(output, *truths[name]) for name, output in named}, case["dtype"])


def _error(torch: Any, got: Any, want: Any) -> Any:
    """The relative error of each head, as `check` has it."""
    rows, sizes = ((x * x).mean(-1) for x in (got - want, want))
    size = sizes.mean(-1)
    worst_row = (rows / torch.maximum(sizes, size[:, None])).amax(-1)
    return torch.maximum(rows.mean(-1) / size, worst_row * measured.ROW_WEIGHT**2) ** 0.5


if __name__ == "__main__":
    serve(measure, sys.argv[1].split(","), int(sys.argv[2]))
