"""Attention on torch's side, which is flash-attn-4: in a process of its own, by CUDA events.

`python -m benchmarks --op=attention` starts `python -m benchmarks.attention_peers`, which never imports JAX and speaks
as `benchmarks.peers` says. Results are judged as `benchmarks.truth` judges, by torch. The backward pass is
timed as on JAX's side, (value and vjp) less forward, and "direct" from what a forward pass saved. A matrix product is
interleaved: shares of it compare across processes. What a peer does not take it refuses, with its own words.
"""

import gc
import importlib
import importlib.metadata
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import peers, verdict

_MATMUL_SIZE = 8192
_REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)

Attend = Callable[[Any, Any, Any], Any]


def measure(torch: Any, case: Mapping[str, Any], names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Checks and times a case, described as in result files, with its flops and the lengths of its documents."""
    impls: dict[str, dict[str, Any]] = {}
    launches: dict[str, Callable[[], Any]] = {}
    operands = _operands(torch, case)
    truths = _truths(torch, case, operands)
    for name in names:
        impls[name], programs = _checked(torch, name, case, operands, truths)
        launches |= {f"{name}:{program}": launch for program, launch in programs.items()}
    truths.clear()
    launches["matmul"] = _matmul(torch)
    bursts = {}
    for name, launch in launches.items():  # "direct" belongs to the stream of its forward pass: no graph
        graphed = not name.endswith(":direct")
        bursts[name] = peers.burst(torch, lambda _, launch=launch: launch(), {**case, "buffers": 1}, graphed=graphed)
    times = peers.interleaved(torch, bursts, rounds)
    matmul = peers.summary(times["matmul"])
    matmul |= {"size": _MATMUL_SIZE, "tflop_per_s": round(2 * _MATMUL_SIZE**3 / matmul["us"] / 1e6, 2)}
    for name, entry in impls.items():
        if entry["status"] == "ok":
            mine = {key.split(":")[1]: samples for key, samples in times.items() if key.startswith(f"{name}:")}
            mine = {key: peers.summary(x) | {"rounds_us": [round(us, 3) for us in x]} for key, x in mine.items()}
            entry |= verdict.speeds(case["pass"], mine, case["flops"])
            entry["matmul_tflop_per_s"] = matmul["tflop_per_s"]
    for held in (bursts, launches, operands):
        held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {"matmul": matmul, "impls": impls}


def _operands(torch: Any, case: Mapping[str, Any]) -> list[Any]:
    """Query, key, value and the cotangent, random normal."""
    torch.manual_seed(0)
    b, t, s, n, k = case["batch"], _queries(case), case["length"], case["heads"], case["key_heads"]
    d, v = case["head_dim"], case["value_dim"]
    shapes = [(b, t, n, d), (b, s, k, d), (b, s, k, v), (b, t, n, v)]
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, case["dtype"])) for shape in shapes]


def _queries(case: Mapping[str, Any]) -> int:
    return case["queries"] or case["length"]


def _matmul(torch: Any) -> Callable[[], Any]:
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.matmul(a, b)


def _checked(
    torch: Any, name: str, case: Mapping[str, Any], operands: Sequence[Any], truths: Mapping[str, tuple[Any, Any]]
) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
    """What is known of an implementation before it is timed, and what to time if it is right."""
    try:
        attend, version = _fa4(torch, case)
        programs = _programs(torch, attend, operands, case["pass"])
        verdicts = []
        for program in programs.values():
            got = program()
            named = zip(verdict.NAMES[len(got)], got, strict=True)
            verdicts.append(_judge(torch, case, {output: x.detach() for output, x in named}, truths))
            del got
        entry = verdict.worst(verdicts).entry() | {"process": "torch", "version": version}
        return entry, programs if entry["status"] == "ok" else {}
    except ImportError as error:
        return {"status": "not installed", "reason": str(error)}, {}
    except NotAsked as reason:
        return {"status": "declined", "reason": str(reason)}, {}
    except Exception as error:
        status = "refuses" if isinstance(error, _REFUSALS) else "failed"
        return {"status": status, "reason": f"{type(error).__name__}: {error}"[:300]}, {}


class NotAsked(Exception):
    """A case that this module does not put to a peer."""


def _fa4(torch: Any, case: Mapping[str, Any]) -> tuple[Attend, str]:
    """The call, and the package's version; documents are sequences of their own lengths."""
    if case["kind"] in ("mask", "causal_mask", "bias"):
        raise NotAsked("flash-attn-4 takes such tensors only by a function compiled into its kernel")
    if _queries(case) != case["length"] and case["kind"] != "full":
        raise NotAsked("flash-attn-4 lets the last query see the last key, and not the first the first")
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


def _by_pair(case: Mapping[str, Any], x: Any) -> list[Any]:
    """For each sequence and key head `[heads, length, dim]`: the key head, or the query heads that share it."""
    group = x.shape[2] // case["key_heads"]
    return [of[:, i : i + group].swapaxes(0, 1) for of in x for i in range(0, x.shape[2], group)]


def _truths(torch: Any, case: Mapping[str, Any], operands: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
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


def _seen(torch: Any, case: Mapping[str, Any]) -> Any:
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


def _judge(torch: Any, case: Mapping[str, Any], got: Mapping[str, Any], truths: Mapping[str, tuple[Any, Any]]) -> Any:
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


if __name__ == "__main__":
    peers.serve(measure, sys.argv[1].split(","), int(sys.argv[2]))
