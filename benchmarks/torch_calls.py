"""The cases of torch's process: operands, the programs of each library, what is right, and what a time means.

Of a loss, "value_and_grad" is what a library does in the fewest passes, so quack's kernel that writes the gradient of
the sum; "value_and_grad_mean" is the mean loss and its gradient by autograd. All but quack have one way for both.
torch.compile is given static shapes, afresh for each case.

Attention is judged as `benchmarks.truth` judges, by torch. Its backward pass is timed as on JAX's side, (value and vjp)
less forward, and "direct" from what a forward pass saved.
"""

import importlib
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import results as verdict

_LOSSES = ("cross_entropy", "top_k")
_LIGER = {"label_smoothing": "label_smoothing", "z_loss": "lse_square_scale", "logits_soft_cap": "softcap"}
_GRAPHED_BYTES = 1 << 28
_MATMUL_SIZE = 8192

Case = Mapping[str, Any]
Attend = Callable[[Any, Any, Any], Any]
Programs = dict[str, Callable[[int], Any]]


class RowCall:
    """A case of softmax or a loss, described as in result files, with bytes and buffers."""

    ceiling, refusals = "copy", (Exception,)

    def __init__(self, torch: Any, case: Case):
        self.torch, self.case, self.buffers = torch, case, case["buffers"]
        self.operands = _row_operands(torch, case)

    def checked(self, name: str) -> tuple[dict[str, Any], Programs]:
        """What is known of a peer, and what to time."""
        function, prepare = _peer(self.torch, name, self.case)
        prepared = [prepare(*operands) for operands in self.operands]
        error = _row_error(self.torch, self.case, self.operands[0], function(*prepared[0]))
        return {"status": "ok", "max_error_ulp": error}, {"": lambda k: function(*prepared[k])}

    def probe(self) -> Callable[[int], Any]:
        """The copy of the same bytes."""
        elements = max(1, self.case["copied_bytes"] // 8)
        new = lambda: self.torch.empty(elements, dtype=self.torch.int32, device="cuda")
        sources = [new().random_() for _ in range(self.buffers)]
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
        self.torch, self.case = torch, case
        self.operands = _attention_operands(torch, case)
        self.truths = _truths(torch, case, self.operands)

    def checked(self, name: str) -> tuple[dict[str, Any], Programs]:
        """What is known of flash-attn-4, and what to time if it is right."""
        attend, version = _fa4(self.torch, self.case)
        programs, verdicts = _programs(self.torch, attend, self.operands, self.case["pass"]), []
        for program in programs.values():
            got = program()
            named = zip(verdict.NAMES[len(got)], got, strict=True)
            verdicts.append(_judge(self.torch, self.case, {output: x.detach() for output, x in named}, self.truths))
            del got
        launches = {name: lambda _, program=program: program() for name, program in programs.items()}
        return verdict.worst(verdicts).entry() | {"version": version}, launches

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
        return verdict.speeds(self.case["pass"], times, self.case["flops"])


def _row_operands(torch: Any, case: Case) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    shape, kind = (case["rows"], case["cols"]), {"device": "cuda", "dtype": getattr(torch, case["dtype"])}
    if case["op"] == "cross_entropy":
        return [(torch.randn(shape, **kind), _labels(torch, case)) for _ in range(case["buffers"])]
    arrays = 1 if case["pass"] in ("fwd", "call") else 2
    return [tuple(torch.randn(shape, **kind) for _ in range(arrays)) for _ in range(case["buffers"])]


def _peer(torch: Any, name: str, case: Case) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
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


def _labels(torch: Any, case: Case) -> Any:
    """Random labels; with an `ignore_index`, every second row has that."""
    y = torch.randint(0, case["cols"], (case["rows"],), device="cuda")
    if "ignore_index" in case["options"]:
        y[::2] = case["options"]["ignore_index"]
    return y


def _loss_peer(torch: Any, name: str, case: Case) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
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


def _loss(torch: Any, name: str, case: Case) -> Callable[..., Any]:
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


def _backward(torch: Any, name: str, case: Case) -> Callable[[Any, Any], Any]:
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


def _row_error(torch: Any, case: Case, operands: Sequence[Any], out: Any) -> float | None:
    """The error of the first and last rows, measured as ours is; None for gradients and selections."""
    if case["pass"] not in ("fwd", "call") or case["op"] == "top_k":
        return None
    ends = [0, -1]
    x = _to_numpy(torch, operands[0][ends])
    if case["op"] == "cross_entropy":
        names = {"label_smoothing": "smoothing", "logits_soft_cap": "soft_cap", "ignore_index": "ignored"}
        options = {names.get(key) or key: value for key, value in case["options"].items()}
        true = verdict.oracle.cross_entropy(x, _to_numpy(torch, operands[1][ends]), **options)
        truth, size = true.loss, true.loss_terms + abs(true.lse)
    else:
        truth, size = getattr(verdict.oracle, case["op"])(x, -1), None
    if case["op"] == "log_softmax":
        size = verdict.oracle.log_softmax_terms(x, -1)
    return round(verdict.errors.max_error(_to_numpy(torch, out.detach()[ends]), truth, magnitude=size), 4)


def _to_numpy(torch: Any, tensor: Any) -> Any:
    """NumPy knows bfloat16 by name once the oracle has imported ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).cpu().numpy().view("bfloat16")
    return tensor.cpu().numpy()


def _attention_operands(torch: Any, case: Case) -> list[Any]:
    """Query, key, value and the cotangent, random normal."""
    torch.manual_seed(0)
    b, t, s, n, k = case["batch"], _queries(case), case["length"], case["heads"], case["key_heads"]
    d, v = case["head_dim"], case["value_dim"]
    shapes = [(b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)]
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, case["dtype"])) for shape in shapes]


def _queries(case: Case) -> int:
    return case["queries"] or case["length"]


def _fa4(torch: Any, case: Case) -> tuple[Attend, str]:
    """The call, and the package's version; documents are sequences of their own lengths."""
    if case["kind"] in ("mask", "causal_mask", "bias"):
        raise NotImplementedError("flash-attn-4 takes such tensors only by a function compiled into its kernel")
    if _queries(case) != case["length"] and case["kind"] != "full":
        raise NotImplementedError("flash-attn-4 lets the last query see the last key, and not the first the first")
    module = importlib.import_module("flash_attn.cute.interface")
    version = importlib.metadata.version("flash-attn-4")
    if case["kind"] == "documents":
        ends = [0, *itertools.accumulate(case["documents"] * case["batch"])]
        ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        lengths |= {"max_seqlen_q": max(case["documents"]), "max_seqlen_k": max(case["documents"])}

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

    if pass_ == "value_and_vjp":
        return {"value_and_vjp": value_and_vjp}
    forward = lambda: (attend(*inputs),)
    if pass_ == "fwd":
        return {"fwd": forward}
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
    return {name: ([x[name] for x, _ in found], [x[name] for _, x in found]) for name in verdict.NAMES[4]}


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
    at, queries = (torch.arange(n, device="cuda") for n in (case["length"], _queries(case)))
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


def _judge(torch: Any, case: Case, got: Mapping[str, Any], truths: Mapping[str, tuple[Any, Any]]) -> Any:
    def errors(name: str) -> list[Any]:
        exact, plain = truths[name]
        mine = [x.float() for x in _by_pair(case, got[name])]
        found = [torch.stack([_error(torch, *x) for x in zip(kind, exact, strict=True)]) for kind in (mine, plain)]
        return [x.reshape((case["batch"], -1)).tolist() for x in found]

    return verdict.worst_head({name: errors(name) for name in got}, case["dtype"])


def _error(torch: Any, got: Any, want: Any) -> Any:
    """The relative error of each head, as `truth` has it."""
    rows, sizes = ((x * x).mean(-1) for x in (got - want, want))
    size = sizes.mean(-1)
    worst_row = (rows / torch.maximum(sizes, size[:, None])).amax(-1)
    return torch.maximum(rows.mean(-1) / size, worst_row * verdict.ROW_WEIGHT**2) ** 0.5
