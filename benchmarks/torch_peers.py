"""Torch's side: torch, quack, Liger and flash-attn-4, in a process of their own, by CUDA events.

`python -m benchmarks` starts `python -m benchmarks.torch_peers`, which never imports JAX: cases come as JSON lines on
standard input, each answered by one line on standard output. The programs of a case interleave round-robin, ten
launches to a pair of events (short ones as a CUDA graph, so that the host's pace does not count), with buffers rotated
as on JAX's side. This process measures its own copy or products, so that shares of it compare across processes.
For a loss, "value_and_grad" is the library's way with the fewest passes, so quack's kernel that writes the gradient of
the sum; "value_and_grad_mean" is the mean loss and its gradient by autograd. torch.compile is given static shapes,
afresh for each case. Attention is judged as `benchmarks.protocol` judges, and timed as on JAX's side.
"""

import collections
import functools
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
_SOFTMAX = {"quack": ("quack.softmax", "softmax"), "liger": (_LIGER, "liger_softmax")}
_GRAPHED_BYTES = 1 << 28
_MATMUL_SIZE = 8192
_LINEAR_BLOCK = 1024  # tokens whose logits are in memory for the check
_LINEAR_ALLOWED = 0.01  # relative error of the mean loss
_SIZES = ("batch", "queries", "length", "heads", "key_heads", "head_dim", "value_dim")

Case = dict[str, Any]
Launch = Callable[[int], Any]  # on the k-th set of operands


def serve(measure: Callable[..., dict[str, Any]], names: Sequence[str], rounds: int) -> None:
    """Answers cases from standard input by `measure`; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is written below Python, too
    try:
        torch = importlib.import_module("torch")
        missing = "" if torch.cuda.is_available() else "a GPU for torch"
    except ImportError:
        torch, missing = None, "torch"
    for text in sys.stdin:
        case = json.loads(text)
        nothing = {"impls": {name: {"status": "not installed", "reason": missing} for name in names}}
        answer = nothing if missing else measure(torch, case, names, rounds)
        print(json.dumps({"name": case["name"], **answer}), file=answers, flush=True)


def measure(torch: Any, case: Case, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Checks and times a case: {"impls": an entry for each name, "copy" or another ceiling: this process's own}."""
    torch.manual_seed(0)
    call_of = AttentionCall if "kind" in case else LinearCall if case["op"] == "linear" else RowCall
    call = call_of(torch, case)
    impls, launches = {}, {}
    for name in names:
        impls[name], programs = _checked(call, name)
        launches |= {f"{name}:{program}": launch for program, launch in programs.items()}
    launches[call.ceiling] = call.probe()
    bursts = {name: burst(torch, launch, call.buffers, graphed=call.graphed(name)) for name, launch in launches.items()}
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


def _checked(call: Any, name: str) -> tuple[dict[str, Any], dict[str, Launch]]:
    """Checks a peer before it is timed, and returns the programs to time if it is right."""
    try:
        entry, programs = call.checked(name)
    except ImportError as error:
        return {"status": "not installed", "reason": str(error)}, {}
    except Exception as error:  # peers refuse shapes in their own ways; the reason is part of the result
        status = "declined" if isinstance(error, call.refusals) else "failed"
        return {"status": status, "reason": f"{type(error).__name__}: {error}"[:300]}, {}
    return {"process": "torch"} | entry, programs if entry["status"] == "ok" else {}


def burst(torch: Any, launch: Launch, buffers: int, *, graphed: bool = False) -> Callable[[], None]:
    """`_LAUNCHES` launches, outputs kept alive as long as inputs rotate; `graphed` as a CUDA graph where possible."""

    def launches() -> None:
        alive = collections.deque(maxlen=buffers)
        for k in range(_LAUNCHES):
            alive.append(launch(k % buffers))

    if not graphed:
        return launches
    try:
        launches()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
    except RuntimeError as error:
        print(f"launched one by one, no CUDA graph: {error}", file=sys.stderr)
        return launches
    return graph.replay


def interleaved(torch: Any, bursts: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per launch, one number for each round; the first round is not counted."""
    times, names = {name: [] for name in bursts}, list(bursts)
    for r in range(rounds + 1):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            bursts[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / _LAUNCHES)
    return {name: us[1:] for name, us in times.items()}


def copying(torch: Any, moved_bytes: int, buffers: int) -> Launch:
    elements = max(1, moved_bytes // 8)
    sources = [torch.empty(elements, dtype=torch.int32, device="cuda").random_() for _ in range(buffers)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda k: targets[k].copy_(sources[k])


class Call:
    """A case as it is described in result files: its operands, its peers, and a ceiling in this process."""

    ceiling, buffers, refusals = "copy", 1, (Exception,)

    def __init__(self, torch: Any, case: Case):
        self.torch, self.case = torch, case

    def graphed(self, name: str) -> bool:
        return False

    def rate(self, probe: dict[str, Any]) -> dict[str, Any]:
        return probe


class RowCall(Call):
    """A case of softmax or a loss, with bytes and buffers."""

    def __init__(self, torch: Any, case: Case):
        super().__init__(torch, case)
        self.buffers = case["buffers"]
        self.operands = [_row_operands(torch, case) for _ in range(self.buffers)]

    def checked(self, name: str) -> tuple[dict[str, Any], dict[str, Launch]]:
        function, prepare = _peer(self.torch, name, self.case)
        prepared = [prepare(*operands) for operands in self.operands]
        error = _row_error(self.torch, self.case, self.operands[0], function(*prepared[0]))
        return {"status": "ok", "max_error_ulp": error}, {"": lambda k: function(*prepared[k])}

    def probe(self) -> Launch:
        return copying(self.torch, self.case["copied_bytes"], self.buffers)

    def graphed(self, name: str) -> bool:
        return self.case["least_bytes"] <= _GRAPHED_BYTES

    def rate(self, probe: dict[str, Any]) -> dict[str, Any]:
        return {"method": "torch", "tb_per_s": self.case["copied_bytes"] / probe["us"] / 1e6, **probe}

    def speeds(self, times: Mapping[str, dict[str, Any]], probe: Mapping[str, Any]) -> dict[str, Any]:
        (taken,) = times.values()
        speed = round(self.case["least_bytes"] / taken["us"] / 1e6, 4)
        return taken | {"tb_per_s": speed, "fraction_of_copy": round(speed / probe["tb_per_s"], 4)}


class LinearCall(Call):
    """Takes a case of `benchmarks.linear`; the weight is `[vocabulary, embedding]`, as the peers have it."""

    ceiling, refusals = "products", (NotImplementedError, AssertionError)

    def __init__(self, torch: Any, case: Case):
        super().__init__(torch, case)
        self.moving = case["moving"]
        m, e, v = (case[name] for name in ("tokens", "embedding", "vocabulary"))
        draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.hidden, self.weight = draw((m, e)), draw((v, e)) * (3 / e**0.5)
        self.labels = torch.randint(0, v, (m,), device="cuda")

    def checked(self, name: str) -> tuple[dict[str, Any], dict[str, Launch]]:
        loss = _linear_loss(name)
        arrays = {n: getattr(self, n).detach().requires_grad_(n in self.moving) for n in ("hidden", "weight")}

        def launch(_: int) -> Any:
            value = loss(arrays["hidden"], arrays["weight"], self.labels)
            return value, self.torch.autograd.grad(value, [arrays[n] for n in self.moving]) if self.moving else ()

        true, found = self._mean_loss(), float(launch(0)[0])
        verdict = measured.Verdict(abs(found - true) / true, 0.0, _LINEAR_ALLOWED, "mean loss", self.case["name"])
        return verdict.entry(), {"": launch}

    def _mean_loss(self) -> float:
        total = 0.0
        for start in range(0, len(self.labels), _LINEAR_BLOCK):
            block = slice(start, start + _LINEAR_BLOCK)
            logits = (self.hidden[block] @ self.weight.T).float()
            total += float(self.torch.nn.functional.cross_entropy(logits, self.labels[block], reduction="none").sum())
        return total / len(self.labels)

    def probe(self) -> Launch:
        """As many bare products, with the same results."""
        h, w, count = self.hidden, self.weight, 1 + len(self.moving)
        g = self.torch.randn((len(h), len(w)) if self.moving else (1, 1), device="cuda", dtype=h.dtype)
        each = [lambda: h @ w.T, lambda: g @ w, lambda: g.T @ h]

        def launch(_: int) -> None:
            for product in each[:count]:  # no result is kept, as two would not fit beside JAX's process
                product()

        return launch

    def speeds(self, times: Mapping[str, dict[str, Any]], probe: Mapping[str, Any]) -> dict[str, Any]:
        (taken,) = times.values()
        return taken | measured.rate(taken, self.case["flops"]) | measured.beside_products(taken, probe)


class AttentionCall(Call):
    """A case of attention, with its flops and the lengths of its documents."""

    ceiling = "matmul"
    refusals = (AssertionError, NotImplementedError, TypeError, ValueError)

    def __init__(self, torch: Any, case: Case):
        super().__init__(torch, case | {"queries": case["queries"] or case["length"]})
        b, t, s, n, k, d, v = (self.case[name] for name in _SIZES)
        shapes = (b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)  # of query, key, value and the cotangent
        kind = {"device": "cuda", "dtype": getattr(torch, case["dtype"])}
        self.operands = [torch.randn(shape, **kind) for shape in shapes]

    def checked(self, name: str) -> tuple[dict[str, Any], dict[str, Launch]]:
        attend, version = _fa4(self.torch, self.case)
        truths = _truths(self.torch, self.case, self.operands)
        programs = _programs(self.torch, attend, self.operands, self.case["pass"])
        verdicts = [_judge(self.torch, self.case, program(), truths) for program in programs.values()]
        launches = {name: lambda _, program=program: program() for name, program in programs.items()}
        return measured.worst(verdicts).entry() | {"version": version}, launches

    def probe(self) -> Launch:
        shape, kind = (_MATMUL_SIZE, _MATMUL_SIZE), {"device": "cuda", "dtype": self.torch.bfloat16}
        a, b = (self.torch.randn(shape, **kind) for _ in range(2))
        return lambda _: self.torch.matmul(a, b)

    def graphed(self, name: str) -> bool:
        return not name.endswith(":direct")  # which belongs to the stream of its forward pass

    def rate(self, probe: dict[str, Any]) -> dict[str, Any]:
        return probe | {"size": _MATMUL_SIZE, "tflop_per_s": round(2 * _MATMUL_SIZE**3 / probe["us"] / 1e6, 2)}

    def speeds(self, times: Mapping[str, dict[str, Any]], probe: Mapping[str, Any]) -> dict[str, Any]:
        return measured.speeds(self.case["pass"], times, self.case["flops"])


def _row_operands(torch: Any, case: Case) -> tuple[Any, ...]:
    """Logits, and random labels or a cotangent; with an `ignore_index`, every second row has that as its label."""
    shape, kind = (case["rows"], case["cols"]), {"device": "cuda", "dtype": getattr(torch, case["dtype"])}
    x = torch.randn(shape, **kind)
    if case["op"] != "cross_entropy":
        return (x,) if case["pass"] in ("fwd", "call") else (x, torch.randn(shape, **kind))
    y = torch.randint(0, case["cols"], (case["rows"],), device="cuda")
    if "ignore_index" in case["options"]:
        y[::2] = case["options"]["ignore_index"]
    return x, y


def _peer(torch: Any, name: str, case: Case) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """Returns the program to time, and how to make its arguments: copies of logits that Liger writes over."""
    op, pass_ = case["op"], case["pass"]
    if op == "top_k":
        return _torch(torch, name, lambda x: torch.topk(torch.softmax(x, -1), case["options"]["k"])), lambda x: (x,)
    if op == "cross_entropy":
        loss = _loss(torch, name, case)
        if name == "quack" and pass_ == "value_and_grad":
            return loss, lambda x, y: (x, y)
        if pass_ == "fwd":
            return lambda x, y: loss(x, y, reduction="none"), lambda x, y: (x.clone(), y)

        def value_and_grad(x, y):
            value = loss(x, y, reduction="mean")
            return value, torch.autograd.grad(value, x)[0]

        return value_and_grad, lambda x, y: (x.clone().requires_grad_(), y)
    if pass_ == "bwd":
        saved = getattr(torch, op)
        return _backward(torch, name, case), lambda x, t: (saved(x, -1), t)
    if name in _SOFTMAX and op == "softmax":
        module, function = _SOFTMAX[name]
        forward = getattr(importlib.import_module(module), function)
    else:
        eager = getattr(torch, op)
        forward = _torch(torch, name, lambda x: eager(x, -1))
    if pass_ != "value_and_vjp":
        return forward, lambda x: (x,)

    def value_and_vjp(x, t):
        y = forward(x)
        return y, torch.autograd.grad(y, x, t)[0]

    return value_and_vjp, lambda x, t: (x.requires_grad_(), t)


def _torch(torch: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by torch itself, compiled or not; other libraries have none."""
    if name not in ("torch", "torch_compile"):
        raise NotImplementedError(f"{name} has no such operation or pass")
    return torch.compile(function, dynamic=False) if name == "torch_compile" else function


def _loss(torch: Any, name: str, case: Case) -> Callable[..., Any]:
    options = {key: value for key, value in case["options"].items() if key != "ignore_index"}  # -100 is everyone's
    if name == "liger":
        function = importlib.import_module(_LIGER).liger_cross_entropy
        return functools.partial(function, **{_LIGER_OPTIONS[key]: value for key, value in options.items()})
    if options:
        raise NotImplementedError(f"{name} has no {', '.join(options)} together")
    if name != "quack":
        return _torch(torch, name, torch.nn.functional.cross_entropy)
    module = importlib.import_module("quack.cross_entropy")
    if case["pass"] == "fwd":
        return lambda x, y, reduction: module.cross_entropy_fwd(x, y)
    if case["pass"] == "value_and_grad_mean":
        return module.cross_entropy

    def in_one(x, y):
        losses, gradient = module.cross_entropy_fwd(x, y, return_dx=True)
        return losses.sum(), gradient

    return in_one


def _backward(torch: Any, name: str, case: Case) -> Callable[[Any, Any], Any]:
    """(saved output, cotangent) to gradient."""
    if name == "torch":
        eager = getattr(torch.ops.aten, f"_{case['op']}_backward_data")
        return lambda y, t: eager(t, y, -1, getattr(torch, case["dtype"]))
    if name == "quack" and case["op"] == "softmax":
        backward = importlib.import_module("quack.softmax").softmax_bwd
        return lambda y, t: backward(t, y)
    if name != "torch_compile" or case["op"] != "softmax":
        raise NotImplementedError(f"{name} has no separate backward of {case['op']}")

    def formula(y, t):
        y32, t32 = y.float(), t.float()
        return (y32 * (t32 - (y32 * t32).sum(-1, keepdim=True))).to(t.dtype)

    return torch.compile(formula, dynamic=False)


def _row_error(torch: Any, case: Case, operands: Sequence[Any], out: Any) -> float | None:
    """The error of the first and last rows, measured as ours is; None for gradients and selections."""
    if case["pass"] not in ("fwd", "call") or case["op"] == "top_k":
        return None
    *operands, out = (_to_numpy(torch, x.detach()[[0, -1]]) for x in (*operands, out))
    ((truth, size),) = measured.row_truths(case, *operands)
    return round(measured.errors.max_error(out, truth, magnitude=size), 4)


def _to_numpy(torch: Any, tensor: Any) -> Any:
    """NumPy knows bfloat16 by name once the oracle has imported ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).cpu().numpy().view("bfloat16")
    return tensor.cpu().numpy()


def _linear_loss(name: str) -> Callable[..., Any]:
    """The mean loss of hidden states, a weight and labels."""
    if name == "quack":
        return importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return importlib.import_module(_LIGER).liger_fused_linear_cross_entropy


def _fa4(torch: Any, case: Case) -> tuple[Callable[..., Any], str]:
    """The call, and the package's version; documents are sequences of their own lengths."""
    kind = case["kind"]
    if kind in ("mask", "causal_mask", "bias"):
        raise NotImplementedError("flash-attn-4 takes such tensors only by a function compiled into its kernel")
    if case["queries"] != case["length"] and kind != "full":
        raise NotImplementedError("flash-attn-4 lets the last query see the last key, and not the first the first")
    module = importlib.import_module("flash_attn.cute.interface")
    version = importlib.metadata.version("flash-attn-4")
    if kind == "documents":
        ends = [0, *itertools.accumulate(case["documents"] * case["batch"])]
        ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
        longest = max(case["documents"])
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

        def packed(query: Any, key: Any, value: Any) -> Any:
            flat = [x.reshape((-1, *x.shape[2:])) for x in (query, key, value)]
            out = module.flash_attn_varlen_func(*flat, causal=True, **lengths)[0]
            return out.reshape((*query.shape[:-1], value.shape[-1]))

        return packed, version
    options = {"window_size": (case["span"] - 1, 0)} if kind == "window" else {"causal": kind != "full"}
    return lambda query, key, value: module.flash_attn_func(query, key, value, **options)[0], version


def _programs(
    torch: Any, attend: Callable[..., Any], operands: Sequence[Any], pass_: str
) -> dict[str, Callable[[], Any]]:
    *inputs, d_out = operands
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def value_and_vjp() -> Any:
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, d_out)

    both = {"fwd": lambda: (attend(*inputs),), "value_and_vjp": value_and_vjp}
    if pass_ != "bwd":
        return {pass_: both[pass_]}
    saved = attend(*leaves)
    return both | {"direct": lambda: torch.autograd.grad(saved, leaves, d_out, retain_graph=True)}


def _by_pair(case: Case, x: Any) -> list[Any]:
    """For each sequence and key head `[heads, length, dim]`: the key head, or the query heads that share it."""
    group = x.shape[2] // case["key_heads"]
    return [of[:, i : i + group].swapaxes(0, 1) for of in x for i in range(0, x.shape[2], group)]


def _truths(torch: Any, case: Case, operands: Sequence[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each sequence and key head, its outputs in float32, and with every array rounded to 16 bits."""
    seen, narrow = _seen(torch, case), getattr(torch, case["dtype"])
    of_pair = lambda arrays, rounded: _attention(torch, seen, [x.float() for x in arrays], rounded)
    pairs = zip(*(_by_pair(case, x) for x in operands), strict=True)
    return [(of_pair(arrays, lambda x: x), of_pair(arrays, lambda x: x.to(narrow).float())) for arrays in pairs]


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
    """Which keys each query sees, `[queries, keys]`, of the kinds that flash-attn-4 takes."""
    key, query = torch.arange(case["length"], device="cuda")[None, :], torch.arange(case["queries"], device="cuda")
    query = query[:, None]
    if case["kind"] == "full":
        return (key >= 0) & (query >= 0)
    seen = key <= query
    if case["kind"] == "window":
        return seen & (query - key < case["span"])
    for start in list(itertools.accumulate(case["documents"]))[:-1]:
        seen = seen & ((query < start) == (key < start))
    return seen


def _judge(torch: Any, case: Case, got: Sequence[Any], truths: Sequence[Any]) -> measured.Verdict:
    errors = {}
    for name, output in zip(measured.NAMES[len(got)], got, strict=True):
        pairs = zip(_by_pair(case, output), truths, strict=True)
        heads = [
            [_error(torch, x, exact[name]) for x in (mine.detach().float(), plain[name])]
            for mine, (exact, plain) in pairs
        ]
        errors[name] = [torch.stack(of).reshape((case["batch"], -1)).tolist() for of in zip(*heads, strict=True)]
    return measured.worst_head(errors, case["dtype"])


def _error(torch: Any, got: Any, want: Any) -> Any:
    rows, sizes = ((x * x).mean(-1) for x in (got - want, want))
    size = sizes.mean(-1)
    worst_row = (rows / torch.maximum(sizes, size[:, None])).amax(-1)
    return torch.maximum(rows.mean(-1) / size, worst_row * measured.ROW_WEIGHT**2) ** 0.5


if __name__ == "__main__":
    serve(measure, sys.argv[1].split(","), int(sys.argv[2]))
