"""Attention's kernels, compiled for an H200 without one: also as code for a linker, which JAX from 0.12 on makes.

What is compiled follows from the heuristics: each kernel with each config that they choose, in the benchmark's calls
and in others.
"""

import collections
import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import aot
import attention_cases
import jax
import jax.numpy as jnp
import pytest
from attention_cases import KINDS, abstract, check_compiled, name_of, problem_of
from selected import cases_for

from benchmarks.attention_cases import TABLE, Shape
from jaxsoftmax import explain_attention
from pallas_kernels.attention import backward_xla, combine, dispatch
from pallas_kernels.attention.dispatch import Decision
from pallas_kernels.attention.problem import Attention, Op
from pallas_kernels.hardware import H200

_MAY_SPILL = 32  # bytes of a thread, in calls that are not the benchmark's

SHAPES = tuple(dict.fromkeys(case.shape for case in TABLE.cases))
MORE_KINDS: dict[str, dict[str, Any]] = {
    "shared-bias": {"bias": "1NTS"},
    "shared-bias-causal": {"bias": "1NTS", "causal_offset": 0},
    "float32-bias": {"bias": "1NTS", "bias_dtype": jnp.dtype("float32")},
    "capped-bias": {"bias": "BNTS", "soft_cap": 2.0},
    "everything-and-bias": KINDS["everything"] | {"bias": "1NTS"},
}
# Their rules are those of "everything", or its lengths at other ends; the benchmark has the common ones by themselves.
WITHIN_EVERYTHING = (
    *("full", "causal", "window-left", "lengths", "key-lengths", "segments", "segments-causal", "soft-cap", "sinks"),
    *("mask-of-keys", "ends"),
)
OTHER_NUMBERS = ("causal-later", "causal-earlier", "window-nothing")  # in the same instructions
DIMS = (
    (64, 64), (128, 128), (256, 256), (192, 128), (80, 80), (16, 32), (96, 72), (256, 64), (224, 160), (32, 200),
)  # fmt: skip
LENGTHS = (1, 128, 512, 1000, 2048, 16384)

Chosen = tuple[str, Decision]  # the kind of call, and what it gets


def of_benchmark(shape: Shape, op: Op) -> Attention:
    """A call of the benchmark, whose gradients are those of query, key and value."""
    facts: dict[str, Any] = {"causal_offset": 0 if shape.is_causal else None, "segments": shape.kind == "documents"}
    if shape.kind == "window":
        facts["window"] = shape.span - 1, 0
    if shape.kind in ("mask", "causal_mask"):
        facts["mask"] = "B1TS"
    if shape.kind == "bias":
        facts |= {"bias": "1NTS", "bias_dtype": jnp.dtype("bfloat16")}
    dims, heads = (shape.head_dim, shape.value_dim), (shape.heads, shape.key_heads)
    return problem_of(op, facts, (shape.length, shape.length), dims, "bfloat16", heads, shape.batch)


def others() -> Iterator[tuple[str, Attention]]:
    """Calls drawn at random, so many that hardly a config is missed, and their kinds."""
    draw = random.Random(0).choice
    kinds = tuple((name, facts) for name, facts in (KINDS | MORE_KINDS).items() if name not in OTHER_NUMBERS)
    for _ in range(5000):
        kind, facts = draw(kinds)
        op, flag, lengths = draw(tuple(Op)), draw((False, True)), (draw(LENGTHS), draw(LENGTHS))
        flags = {"batch_invariant": flag}
        if op is Op.BACKWARD:
            flags = {"deterministic": flag, "bias_gradient": "bias" in facts and draw((False, True))}
        dtype, heads, batch = draw(("bfloat16", "float16")), draw(((4, 4), (4, 1))), draw((1, 8))
        yield kind, problem_of(op, facts | flags, lengths, draw(DIMS), dtype, heads, batch)


def adding(chosen: Iterable[Chosen], features: Callable[[Chosen], set[Any]]) -> list[Chosen]:
    """Those with a feature that none before them has."""
    seen, found = set(), []
    for one in chosen:
        if not features(one) <= seen:
            seen |= features(one)
            found.append(one)
    return found


def config_of(decision: Decision) -> Any:
    """The config, without numbers that no instruction depends on, but for whether there are several splits."""
    config = decision.config
    if decision.problem.op is Op.FORWARD:
        return dataclasses.replace(config, splits=min(config.splits, 2), l2_budget_mib=0, ctas_per_sm=1)
    if config.scheduler == "static":
        config = dataclasses.replace(config, scheduler="single")  # which starts another number of CTAs
    return dataclasses.replace(config, heads_per_l2_group=1, head_splits=1)


# Kinds of the benchmark, by the names that they have here; those of other instructions have names of their own.
_NAMES = {"documents": "segments-causal", "causal_mask": "mask", "bias": "benchmark-bias", "window": "benchmark-window"}


def cells() -> list[Chosen]:
    """The benchmark's calls; of those that differ in batch and length alone, one for each config."""

    def features(one: Chosen) -> set[Any]:
        kind, decision = one
        p = decision.problem
        return {(decision.kernel, config_of(decision), kind, p.head_dim, p.value_dim)}

    problems = ((_NAMES.get(shape.kind, shape.kind), of_benchmark(shape, op)) for shape in SHAPES for op in Op)
    return adding(((kind, dispatch.decide(p, H200)) for kind, p in problems), features)


def covering() -> list[Chosen]:
    """Few calls that have, with those of the benchmark, every config that any call gets, and every size and kind."""

    def features(one: Chosen) -> list[Any]:
        kind, decision = one
        p = decision.problem
        ragged, heads = (p.query_length % 64 > 0, p.key_length % 64 > 0), (p.query_heads, p.key_heads)
        splits = getattr(decision.config, "head_splits", 1) > 1
        flags = p.deterministic or p.batch_invariant, splits
        kinds = [] if kind in WITHIN_EVERYTHING else [kind]
        found = *kinds, (p.head_dim, p.value_dim), config_of(decision), ragged, heads, p.dtype, ("flags", *flags)
        return [(decision.kernel, x) for x in found]

    decided = ((kind, dispatch.decide(p, H200)) for kind, p in others())
    chances = {one: features(one) for one in decided if one[1].kernel}
    having = collections.defaultdict(list)
    for one, each in chances.items():
        for feature in each:
            having[feature].append(one)
    missing = set(having).difference(*map(features, cells()))
    found = []
    # What few calls have first: another choice may be had by the way.
    for feature in sorted(having, key=lambda x: len(having[x])):
        if feature in missing:
            found.append(max(having[feature], key=lambda one: len(missing.intersection(chances[one]))))
            missing.difference_update(chances[found[-1]])
    return found


def id_of(one: Any) -> str | None:
    return f"{one.kernel}-{name_of(one.problem)}" if isinstance(one, Decision) else None


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_benchmarks_calls_are_those_compiled_here(shape):
    operands = jax.eval_shape(lambda: shape.operands(0))
    operands.pop("d_out")
    call = {
        "is_causal": shape.is_causal,
        "local_window_size": (shape.span - 1, 0) if shape.kind == "window" else None,
        "device": H200,
    }
    for op, name in ((Op.FORWARD, "forward"), (Op.BACKWARD, "vjp")):
        explained = explain_attention(**operands, **call, op=name)
        assert explained.config == dispatch.decide(of_benchmark(shape, op), H200).config


@pytest.mark.aot
@pytest.mark.parametrize("kind, decision", cells(), ids=id_of)
def test_the_benchmarks_calls_compile_without_spills(kind, decision):
    with jax.enable_checks(True):
        check_compiled(decision.problem)


@pytest.mark.aot
@pytest.mark.parametrize("kind, decision", cases_for("aot", covering), ids=id_of)
def test_every_config_compiles_with_few_spills(kind, decision):
    p = decision.problem
    # No config of the wide backward kernel has the registers for an ordered dQ beside everything.
    is_wide = p.op is Op.BACKWARD and max(p.head_dim, p.value_dim) > 128
    # Three warpgroups have few registers for masks and segments.
    is_masked = p.op is Op.FORWARD and max(p.head_dim, p.value_dim) <= 64 and p.has_data_mask
    # Of heads up to 64, 128 queries at a time and a soft cap have few registers for the order of dQ and masks.
    is_narrow = p.op is Op.BACKWARD and max(p.head_dim, p.value_dim) <= 64
    is_capped = is_narrow and p.soft_cap is not None and (p.deterministic or p.has_data_mask)
    few = 52 if is_masked or (is_wide and p.deterministic) else _MAY_SPILL
    check_compiled(p, may_spill=660 if is_capped else few)


@pytest.mark.aot
@pytest.mark.parametrize("splits, sinks", [(2, False), (combine.MOST_AT_ONCE, True)])
def test_the_merge_of_splits_compiles_without_spills(splits, sinks):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    operands = of(splits, 3, 5, 8, 72), of(splits, 3, 5, 8), *[of(8)] * sinks
    run = lambda parts, lses, *sinks: combine.run(parts, lses, *(sinks or [None]), jnp.dtype("bfloat16"))
    (report,) = aot.compile_for_h200(run, *operands)
    attention_cases.check_report(report)


@pytest.mark.aot
@pytest.mark.parametrize(
    "op, dims, facts, lengths",
    [
        (Op.FORWARD, (128, 128), {}, (1363, 1363)),
        (Op.FORWARD, (72, 72), {"key_lengths": True}, (6511, 76)),
        (Op.FORWARD, (136, 200), {}, (38, 2021)),
        (Op.BACKWARD, (128, 128), {}, (38, 2021)),
        (Op.BACKWARD, (72, 72), {"key_lengths": True}, (1363, 1363)),
        (Op.BACKWARD, (136, 200), {}, (6511, 76)),
    ],
    ids=str,
)
def test_no_operand_is_copied(op, dims, facts, lengths):
    """But for dQ's sum in float32 and the statistics of rows, which the backward pass makes, and splits' outputs."""
    p = problem_of(op, facts, lengths, dims, "bfloat16", (4, 2), 64)
    operands = aot.on_h200(abstract(p))
    decision = dispatch.decide(p, H200)
    program = jax.jit(decision.run).lower(*operands).compile()
    least = min(math.prod(x.shape) * x.dtype.itemsize for x in operands[:3])
    of_row = 4 * (backward_xla.padded_dims(p)[0] + 8)
    if op is Op.FORWARD:
        of_row = 4 * (p.value_dim + 1) * decision.config.splits if decision.config.splits > 1 else 0
    made = p.batch * p.query_heads * (p.query_length + 128) * of_row
    assert program.memory_analysis().temp_size_in_bytes < made + least


# What ptxas complains of, by what is put into a kernel in the place of something else.
_PLANTED = {
    "C7504": (r"\n\s*ret;", "\nsetmaxnreg.dec.sync.aligned.u32 24;\nret;"),
    "C751[12]": (r"\.maxntid \d+", ".maxntid 512"),  # 128 registers for each thread
    "[1-9][0-9]* bytes spilled": (r"\.maxntid \d+", ".maxntid 512"),
}


@pytest.mark.aot
@pytest.mark.parametrize("complaint", _PLANTED)
def test_complaints_about_relocatable_code_are_seen(complaint, monkeypatch):
    p = problem_of(Op.FORWARD, {}, (512, 512), (128, 128), "bfloat16", (2, 2))
    report = attention_cases.compiled(p)
    ptx, count = re.subn(*_PLANTED[complaint], report.ptx)
    assert count
    monkeypatch.setattr(attention_cases, "compiled", lambda *_: dataclasses.replace(report, ptx=ptx))
    with pytest.raises(AssertionError, match=complaint):
        check_compiled(p)
