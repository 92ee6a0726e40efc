"""Every measurement goes by this: the gate, whether a result is right, and then the clock.

The gate
  Sampled rows of softmax and losses (the first and last always; all rows of small cases) are compared with NumPy
  float64 under the project's one rule, error <= 2 x the error of XLA in the same dtype + 1 unit in the last place,
  relative to the true value; and every row is compared on the device, more loosely, with XLA in float32, so that no row
  can be missing.

  Every head of every sequence of attention is compared on the device with float32. The rule is FlashAttention's, for
  each head: the error is at most twice that of XLA in 16 bits, plus half a unit of the dtype. Errors are root mean
  squares, relative to the truth's; the worst row counts by a sixteenth, lest it be lost in the mean of thousands.

The clock
  1. Every variant is a compiled program; compilation and a first launch are never timed.
  2. The variants of a case run interleaved, round-robin, in one schedule: each round launches every variant a few
     times, and the order of the variants rotates from round to round: a drifting clock touches all of them alike.
  3. Inputs rotate over enough buffers, and outputs are kept alive over as many launches, that at least
     `cases.ROTATED_BYTES` pass between two uses of one address: L2 (50 MB) holds nothing of use. Cases tagged "hot" use
     one buffer.
  4. Time is the device's: CUPTI's duration of each kernel, summed over the kernels of a launch, the whole schedule in
     one CUPTI session after an identical warm-up. Gaps between launches do not count, and neither do those between
     the kernels of one launch.
  5. If the kernels seen are not the kernels launched, each round of each variant gets a session of its own. Without
     CUPTI (a CPU, or a profiler that fails) time is wall clock around a blocked launch. The clock used is part of
     every result.
  6. The ceiling of a case is a copy of as many bytes in the same schedule. XLA's elementwise code is none (3.4 TB/s
     where a copy reaches 4.2), so the better of two counts: a Mosaic GPU kernel that loads registers and stores them,
     and torch's `copy_`, which is the driver's own, by CUDA events, where torch can be imported beside JAX.
  7. Reported: median, minimum, maximum and the 20th and 80th percentiles over all launches, and each round's median.
"""

import collections
import dataclasses
import functools
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks import impls, linear
from benchmarks import results as measured
from benchmarks.attention_cases import AttentionCase, Shape
from benchmarks.cases import Case
from benchmarks.linear import LinearCase
from benchmarks.results import NAMES, Verdict
from benchmarks.stock import xla_loss

AnyCase = Case | AttentionCase | LinearCase

_SAMPLED_ELEMENTS = 1 << 20
_CHECKED_ELEMENTS = 1 << 28  # at once, in float32
_LOOSE = {"float32": 64 * 2.0**-23, "float16": 8 * 2.0**-10, "bfloat16": 8 * 2.0**-7}  # relative errors of every row
_SCORES = 1 << 28  # of attention at once, in float32: a head of 16384 tokens
# The truth is not timed: XLA need not try which of its products are fast, which takes most of the time to compile it.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_ROUND_SECONDS = 1e-3  # of device time per variant and round
_ASSUMED_BYTES_PER_SECOND = 3e12


def compiled_truth(case: AnyCase, specs: tuple[Any, ...], graded: bool) -> Any:
    """Makes the check of rows or of a call; or the truth of attention, with its gradients if `graded`, or of a loss."""
    if isinstance(case, LinearCase):
        return jax.jit(linear.truth).lower(*specs).compile(compiler_options=_UNTUNED)
    if isinstance(case, AttentionCase):
        program = functools.partial(attention, case.shape, gradients=graded)
        return jax.jit(program).lower(*specs).compile(compiler_options=_UNTUNED)
    program = impls.build(case, "xla")
    prepare = program.prepare or (lambda *operands: operands)
    outputs = jax.eval_shape(lambda *operands: program.function(*prepare(*operands)), *specs)
    if not case.source:
        check = jax.jit(functools.partial(_call_errors, case))
        return check.lower(specs, outputs, outputs).compile(compiler_options=_UNTUNED)
    return (
        every_row(case)
        .lower(specs, [specs[0]] if "axis" in case.options else jax.eval_shape(_widened, outputs))
        .compile()
    )


def judge(case: AnyCase, operands: tuple[Any, ...], got: Any, truths: Any) -> Verdict:
    """The verdict on outputs; `truths` are attention's or a loss's, or `compiled_truth(case)` and XLA's outputs."""
    is_gpu = jax.default_backend() == "gpu"
    if isinstance(case, LinearCase):
        errors = linear.errors(got, truths)
        return measured.worst(Verdict(error, 0.0, linear.ALLOWED, name, case.name) for name, error in errors.items())
    if isinstance(case, AttentionCase):
        named = dict(zip(NAMES[len(got)], got, strict=True))
        errors = jax.device_get(_head_errors(case.shape, named, {name: truths[name] for name in named}))
        dtype = "tf32" if case.shape.dtype == "float32" and is_gpu else case.shape.dtype
        return measured.worst_head({name: found.tolist() for name, found in errors.items()}, dtype)
    check, xla = truths
    if not case.source:
        errors = {name: found.tolist() for name, found in jax.device_get(check(operands, got, xla)).items()}
        multiplies = case.operation.has_products and is_gpu
        return measured.worst_head(errors, "tf32" if multiplies and case.dtype == "float32" else case.dtype)
    if "axis" in case.options:
        got, xla = jax.tree.map(jnp.transpose, (got, xla))
    rows = _sampled_rows(case)
    sampled = [jax.device_get([x[rows] for x in jax.tree.leaves(y) if x.ndim]) for y in (operands, got, xla)]
    deviation = float(check(operands, _widened(got)))
    verdicts = []
    for mine, theirs, (true, size) in zip(*sampled[1:], measured.row_truths(case.describe(), *sampled[0]), strict=True):
        # Where XLA itself overflows, as much is allowed as if it were off by one.
        known = error if math.isfinite(error := _error(theirs, true, size)) else 1.0
        verdicts.append(Verdict(_error(mine, true, size), known, 1.0, every_row=deviation))
    return next((v for v in verdicts if not v.right), max(verdicts, key=lambda v: v.error))


def _widened(outputs: Any) -> list[jax.Array]:
    """One number a row, or one in all, in float32: what XLA gives in the logits' dtype, ours may give so."""
    is_small = lambda y: y.ndim < 2 and jnp.issubdtype(y.dtype, jnp.floating)
    return [y.astype(jnp.float32) if is_small(y) else y for y in jax.tree.leaves(outputs)]


def _error(got: np.ndarray, true: np.ndarray, size: np.ndarray | None) -> float:
    if np.issubdtype(got.dtype, np.integer):
        return 0.0 if np.array_equal(got, true) else math.inf
    return measured.errors.max_error(got, true, magnitude=size)


def _sampled_rows(case: Case) -> np.ndarray:
    count = min(case.rows, max(2, _SAMPLED_ELEMENTS // case.cols))
    inner = np.random.default_rng(0).permutation(np.arange(1, case.rows - 1))[: count - 2]
    return np.unique(np.concatenate([[0, case.rows - 1], inner]))


def every_row(case: Case) -> Any:
    """A jitted function of (operands, outputs): the largest deviation from XLA in float32, 1 being tolerated."""

    def row(operands: Sequence[jax.Array], got: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        loss, wanted = _row_in_float32(case, *operands)
        dtype = "float32" if (case.op, case.pass_) == ("cross_entropy", "fwd") else case.dtype
        return jnp.stack([_off(y, *want, dtype) for y, want in zip(got, wanted, strict=True)]).max(), loss

    def check(operands: tuple[jax.Array, ...], got: Any) -> jax.Array:
        leaves = jax.tree.leaves(got)
        of_rows = [leaf for leaf in leaves if leaf.ndim]
        batch = max(1, _CHECKED_ELEMENTS // case.cols)
        off, losses = lax.map(lambda leaves: row(*leaves), (operands, of_rows), batch_size=batch)
        values = [_off(leaf, losses.mean(), jnp.abs(losses).mean(), "float32") for leaf in leaves if not leaf.ndim]
        return jnp.stack([off.max(), *values]).max()

    return jax.jit(check)


def _row_in_float32(case: Case, x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, list[tuple[Any, Any]]]:
    """The loss of a row, and of each output that has rows (what it is, the size that an error is relative to).

    A probability is compared with itself, what may be a difference of larger terms with the largest of its row.
    """
    nothing = jnp.zeros(())
    if case.op == "top_k":
        _, best = lax.top_k(x, case.options["k"])
        p = jax.nn.softmax(x.astype(jnp.float32))[best]
        return nothing, [(p, p), (best, nothing)]
    x = x.astype(jnp.float32)
    if case.op == "cross_entropy":
        one = lambda x: xla_loss(x[None], rest[0][None], **case.options)[0]
        loss, gradient = jax.value_and_grad(one)(x)
        if case.pass_ == "fwd":
            return loss, [(loss, jnp.abs(x).max() + math.log(case.cols) + case.options.get("logits_soft_cap", 0.0))]
        subtracted = 2 * case.options.get("label_smoothing", 0.0) / case.cols
        return loss, [(gradient / case.rows, (jnp.abs(gradient) + subtracted) / case.rows)]
    y, pull = jax.vjp(getattr(jax.nn, case.op), x)
    found = [(y, jnp.abs(y) if case.op == "softmax" else jnp.abs(y).max())]
    if rest:
        (dx,) = pull(rest[0].astype(jnp.float32))
        found.append((dx, jnp.abs(dx).max()))
    return nothing, found[-1:] if case.pass_ == "bwd" else found


def _off(got: jax.Array, want: jax.Array, size: jax.Array, dtype: str) -> jax.Array:
    """The largest deviation as a share of what is allowed; indices are right or wrong."""
    if jnp.issubdtype(got.dtype, jnp.integer):
        return jnp.where((got == want).all(), 0.0, jnp.inf)
    # Not below what float32 has as a normal number: 0 / 0 is no deviation.
    size = jnp.maximum(size, float(jnp.finfo(dtype).tiny))
    allowed = jnp.maximum(_LOOSE[dtype] * size, jnp.finfo(jnp.float32).tiny)
    off = jnp.abs(got.astype(jnp.float32) - want) / allowed
    return jnp.where(jnp.isnan(off), jnp.inf, off).max()


def _call_errors(case: Case, operands: tuple[jax.Array, ...], got: Any, xla: Any) -> dict[str, jax.Array]:
    """Returns each output's errors, `[2, 1, 1]`: of the judged one and of XLA's, by the rows of its last axis.

    The truth is `jax.nn` in float32.
    """
    widened = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    with jax.default_matmul_precision("highest"):
        true = impls.build(case, "truth").function(*widened)

    def error(found: jax.Array, want: jax.Array) -> jax.Array:
        if jnp.issubdtype(want.dtype, jnp.integer):
            return jnp.where((found == want).all(), 0.0, jnp.inf)
        found, want = (x.astype(jnp.float32).reshape(-1, x.shape[-1] if x.ndim else 1) for x in (found, want))
        return _head_error(found, want)

    found = {}
    for i, (mine, want, theirs) in enumerate(zip(*map(jax.tree.leaves, (got, true, xla)), strict=True)):
        # Not finite where XLA overflows or does not compile, or takes another of two that it rounds alike.
        known, rounded = error(theirs, want), error(want.astype(theirs.dtype), want)
        both = error(mine, want), jnp.where(jnp.isfinite(known), known, rounded)
        found[f"output {i}"] = jnp.stack(both)[:, None, None]
    return found


def attention(
    shape: Shape, operands: Mapping[str, jax.Array], *, gradients: bool
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """For each output, `[batch, key_heads, group, length, dim]` in float32 and by XLA in the operands' dtype."""
    group = shape.heads // shape.key_heads
    arrays = [_by_head(shape, operands[name]) for name in ("query", "key", "value", "d_out")]

    def of_pair(pair: jax.Array) -> Any:
        sequence, head = pair // shape.key_heads, pair % shape.key_heads
        mine = [x[sequence, head] for x in arrays]
        bias = (
            operands["bias"][0].reshape(shape.key_heads, group, shape.query_length, shape.length)[head]
            if "bias" in operands
            else None
        )
        seen = _seen(shape, operands, sequence)
        return [_computed(shape, mine, bias, seen, x, gradients) for x in (jnp.float32, operands["query"].dtype)]

    at_once = max(_SCORES // (group * shape.query_length * shape.length), 1)
    found = lax.map(of_pair, jnp.arange(shape.batch * shape.key_heads), batch_size=at_once)
    exact, plain = jax.tree.map(lambda x: x.reshape(shape.batch, shape.key_heads, *x.shape[1:]), found)
    return {name: (exact[name], plain[name]) for name in exact}


@jax.jit(static_argnames="shape")
def _head_errors(shape: Shape, got: Mapping[str, jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]) -> Any:
    """Returns each output's errors, of the judged one and of XLA's in 16 bits, `[2, batch, heads]`."""

    def pair(name: str) -> jax.Array:
        want, xla = truths[name]
        found = jnp.stack([_head_error(x.astype(jnp.float32), want) for x in (_by_head(shape, got[name]), xla)])
        return found.reshape(2, shape.batch, -1)

    return {name: pair(name) for name in got}


def _head_error(got: jax.Array, want: jax.Array) -> jax.Array:
    rows, sizes = ((x**2).mean(-1) for x in (got - want, want))
    size = sizes.mean(-1)
    # A row may be nearly zero, as the first queries' gradients are under a causal mask.
    worst_row = (rows / jnp.maximum(sizes, size[..., None])).max(-1)
    return jnp.sqrt(jnp.maximum(rows.mean(-1) / size, worst_row * measured.ROW_WEIGHT**2))


def _by_head(shape: Shape, x: jax.Array) -> jax.Array:
    """`[batch, length, heads, dim]` as `[batch, key_heads, group, length, dim]`, the group of one for keys."""
    batch, length, heads, dim = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(batch, shape.key_heads, heads // shape.key_heads, length, dim)


def _computed(
    shape: Shape, arrays: Sequence[jax.Array], bias: jax.Array | None, seen: jax.Array, dtype: Any, gradients: bool
) -> dict[str, jax.Array]:
    """One key head of a sequence with the query heads that share it."""
    *inputs, d_out = (x.astype(dtype) for x in arrays)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        logits = jnp.einsum("gth,sh->gts", query, key[0], preferred_element_type=jnp.float32, precision="highest")
        logits = logits / math.sqrt(shape.head_dim)
        logits = logits if bias is None else logits + bias.astype(jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1).astype(dtype)
        return jnp.einsum("gts,sd->gtd", weights, value[0], precision="highest")

    if not gradients:
        return {"out": attend(*inputs)}
    out, pull = jax.vjp(attend, *inputs)
    return dict(zip(NAMES[4], (out, *pull(d_out)), strict=True))


def _seen(shape: Shape, operands: Mapping[str, jax.Array], sequence: jax.Array) -> jax.Array:
    """Which keys each query of a sequence sees, `[queries, keys]`, written independently of what is measured."""
    query, key = jnp.arange(shape.query_length)[:, None], jnp.arange(shape.length)[None, :]
    is_causal = shape.is_causal or shape.kind == "causal_mask"
    seen = key <= query if is_causal else jnp.ones((shape.query_length, shape.length), bool)
    if shape.kind == "window":
        seen &= query - key < shape.span
    if shape.kind == "documents":
        ids = operands["query_segment_ids"][sequence]
        seen &= ids[:, None] == ids[None, :]
    if shape.kind == "lengths":
        seen &= key < operands["key_value_seq_lengths"][sequence]
    return seen & operands["mask"][sequence, 0] if shape.kind == "mask" else seen


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named program; `launch(k)` runs it on the k-th set of buffers and returns its outputs.

    By wall clock, `calls` are enqueued at once, and each takes its share. It may have `launches` of its own in a round.
    """

    name: str
    launch: Callable[[int], Any]
    calls: int = 1
    launches: int | None = None


@dataclasses.dataclass
class Timing:
    """Times of one variant, in microseconds, by round."""

    rounds: list[list[float]]
    kernels: list[str] = dataclasses.field(default_factory=list)
    each: list[list[float]] = dataclasses.field(default_factory=list)  # of every launch, the times of its kernels

    @property
    def median(self) -> float:
        return statistics.median(itertools.chain(*self.rounds))

    def as_json(self) -> dict[str, Any]:
        samples = list(itertools.chain(*self.rounds))
        rounds = [round(statistics.median(r), 3) for r in self.rounds]
        facts = {"rounds_us": rounds, "launches": len(samples), "kernels": self.kernels}
        if len(self.kernels) > 1 and self.each:
            facts["kernels_us"] = [round(statistics.median(times), 3) for times in zip(*self.each, strict=True)]
        return measured.summary(samples) | facts


def launches_per_round(least_bytes: int) -> int:
    """Enough launches for a steady round, few enough for a short one."""
    return int(np.clip(_ROUND_SECONDS / (least_bytes / _ASSUMED_BYTES_PER_SECOND), 2, 10))


def measure(
    variants: Sequence[Variant], *, buffers: int, rounds: int, launches: int, device_clock: bool
) -> tuple[str, dict[str, Timing]]:
    """Times variants of unique names, interleaved; `launches` are those of each variant in a round.

    Returns:
      The clock ("cupti", "cupti, each round apart" or "wall"), and the timing of each variant by name.
    """
    if not variants:
        return "none", {}
    schedule = _Schedule(variants, buffers, rounds, launches)
    clocks = {"cupti": _measure_cupti, "cupti, each round apart": _measure_cupti_apart} if device_clock else {}
    for clock, way in clocks.items():
        try:
            return clock, way(schedule)
        except Exception as error:  # the profiler's failures have no common type; the run goes on, saying so
            warnings.warn(f"no time by {clock}: {type(error).__name__}: {error}", stacklevel=2)
    return "wall", _measure_wall(schedule)


class _Schedule:
    """All launches of a measurement, in order.

    Implements `jax.stages.Wrapped`, which the profiler asks of what it runs, so that one CUPTI session covers launches
    of many programs on many buffers.
    """

    def __init__(self, variants: Sequence[Variant], buffers: int, rounds: int, launches: int):
        self.variants, self.buffers, self.rounds, self.launches = tuple(variants), buffers, rounds, launches

    def slots(self) -> Iterator[tuple[int, Variant]]:
        for r in range(self.rounds):
            first = r % len(self.variants)
            for variant in self.variants[first:] + self.variants[:first]:
                yield from [(r, variant)] * (variant.launches or self.launches)

    def empty(self) -> dict[str, Timing]:
        return {variant.name: Timing([[] for _ in range(self.rounds)]) for variant in self.variants}

    def alone(self, variant: Variant, launches: int = 1) -> "_Schedule":
        return _Schedule([variant], self.buffers, 1, launches)

    def __call__(self) -> list[Any]:
        alive = collections.deque(maxlen=self.buffers)
        for k, (_, variant) in enumerate(self.slots()):
            alive.append(variant.launch(k % self.buffers))
        return list(alive)

    def trace(self, *_, **__):
        raise NotImplementedError("a schedule only runs")

    lower = trace


def _device_kernels(schedule: _Schedule) -> list[tuple[str, float]]:
    _, kernels = profiler.measure(schedule, aggregate=False)()
    if not kernels:
        raise RuntimeError("CUPTI saw no kernel")
    return kernels


def _measure_cupti(schedule: _Schedule) -> dict[str, Timing]:
    found = schedule.empty()
    for variant in schedule.variants:
        found[variant.name].kernels = [name for name, _ in _device_kernels(schedule.alone(variant))]
    kernels = iter(_device_kernels(schedule))
    for r, variant in schedule.slots():
        timing = found[variant.name]
        launched = list(itertools.islice(kernels, len(timing.kernels)))
        if [name for name, _ in launched] != timing.kernels:
            raise RuntimeError(f"{variant.name}: expected kernels {timing.kernels}, CUPTI saw {launched}")
        timing.each.append([1e3 * ms for _, ms in launched])
        timing.rounds[r].append(sum(timing.each[-1]))
    if next(kernels, None) is not None:
        raise RuntimeError("CUPTI saw more kernels than were launched")
    return found


def _measure_cupti_apart(schedule: _Schedule) -> dict[str, Timing]:
    """A CUPTI session for each round of each variant: no doubt whose kernels they are, but only their sum counts."""
    found = schedule.empty()
    for r, variant in dict.fromkeys(schedule.slots()):
        kernels = _device_kernels(schedule.alone(variant, schedule.launches))
        found[variant.name].rounds[r].append(1e3 * sum(ms for _, ms in kernels) / schedule.launches)
    return found


def _measure_wall(schedule: _Schedule) -> dict[str, Timing]:
    found = schedule.empty()
    for variant in schedule.variants:
        jax.block_until_ready(variant.launch(0))
    for k, (r, variant) in enumerate(schedule.slots()):
        out, start = None, time.perf_counter()
        for _ in range(variant.calls):
            out = None  # frees the results of the call before
            out = variant.launch(k % schedule.buffers)
        jax.block_until_ready(out)
        found[variant.name].rounds[r].append(1e6 * (time.perf_counter() - start) / variant.calls)
    return found
