"""The gate before every time: is the result right?

Of softmax and losses, sampled rows (the first and last always; all rows of small cases) are compared with NumPy
float64 under the project's one rule, error <= 2 x the error of XLA in the same dtype + 1 unit in the last place,
relative to the true value; and every row is compared on the device, more loosely, with the float32 reference, so that
no row can be missing.

Of attention, every head of every sequence is compared on the device with float32. The rule is FlashAttention's, for
each head: the error is at most twice that of XLA in 16 bits, plus half a unit of the dtype. Errors are root mean
squares, relative to the truth's; the worst row counts by a sixteenth, lest it be lost in the mean of thousands.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import impls
from benchmarks.attention_cases import AttentionCase, Shape
from benchmarks.cases import RowCase
from benchmarks.impls import LOSSES
from benchmarks.results import NAMES, ROW_WEIGHT, Verdict, errors, oracle, worst_head
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED

_SAMPLED_ELEMENTS = 1 << 20
_CHECKED_ELEMENTS = 1 << 28  # at once, in float32
_LOSS_ULPS = 64.0
_SCORES = 1 << 28  # of attention at once, in float32: a head of 16384 tokens
# The truth is not timed: XLA need not try which of its products are fast, which takes most of the time to compile it.
_UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_LOOSE_ULPS = {"float32": 64.0, "float16": 8.0, "bfloat16": 8.0}


def compiler(case: RowCase | AttentionCase, specs: tuple[Any, ...], graded: bool) -> Callable[[], Any]:
    """Compiles what knows the truth of a case: the check of every row, or attention, with its gradients if `graded`."""
    if isinstance(case, AttentionCase):
        program = functools.partial(attention, case.shape, gradients=graded)
        return functools.partial(jax.jit(program).lower(*specs).compile, compiler_options=_UNTUNED)
    program = impls.build(case, "xla")
    prepare = program.prepare or (lambda *operands: operands)
    outputs = jax.eval_shape(lambda *operands: widened(program.function(*prepare(*operands))), *specs)
    if "axis" in case.options:
        outputs = [specs[0]]
    return every_row(case).lower(specs, outputs).compile


def judged(case: RowCase | AttentionCase, operands: tuple[Any, ...], got: Any, truths: Any) -> Verdict:
    """The verdict on outputs; `truths` are attention's, or the compiled check of rows and XLA's outputs."""
    if isinstance(case, AttentionCase):
        return judge_attention(case.shape, got, truths)
    check, xla = truths
    if "axis" in case.options:
        got, xla = jax.tree.map(jnp.transpose, (got, xla))
    return judge(case, operands, got, xla, check)


def judge(
    case: RowCase, operands: tuple[jax.Array, ...], got: Any, xla: Any, check: Callable[..., jax.Array]
) -> Verdict:
    """Compares `got` with the truth, and with how far `xla` is from it.

    Args:
      case: what was computed.
      operands: the case's operands.
      got: the outputs to judge.
      xla: XLA's outputs in the same dtype.
      check: `every_row(case)`, perhaps compiled.
    """
    rows = _sampled_rows(case)
    sampled = jax.device_get([_take(leaf, rows) for leaf in operands])
    truths = _truths(case, sampled)
    outputs = [jax.device_get([_take(leaf, rows) for leaf in jax.tree.leaves(out) if leaf.ndim]) for out in (got, xla)]
    ours, xlas = ([_error(o, t, m) for o, (t, m) in zip(out, truths, strict=True)] for out in outputs)
    deviation = float(check(operands, widened(got)))
    # Where XLA itself overflows, as much is allowed as if it were off by one.
    known = [error if math.isfinite(error) else 1.0 for error in xlas]
    verdicts = [Verdict(a, b, 1.0, every_row=deviation) for a, b in zip(ours, known, strict=True)]
    return next((v for v in verdicts if not v.right), max(verdicts, key=lambda v: v.error))


def widened(outputs: Any) -> list[jax.Array]:
    """One number a row, or one in all, in float32: what XLA gives in the logits' dtype, ours may give so."""
    is_small = lambda y: y.ndim < 2 and jnp.issubdtype(y.dtype, jnp.floating)
    return [y.astype(jnp.float32) if is_small(y) else y for y in jax.tree.leaves(outputs)]


def _error(got: np.ndarray, true: np.ndarray, magnitude: np.ndarray | None) -> float:
    """In units of the last place; indices are right or wrong."""
    if np.issubdtype(got.dtype, np.integer):
        return 0.0 if np.array_equal(got, true) else math.inf
    return errors.max_error(got, true, magnitude=magnitude)


def _sampled_rows(case: RowCase) -> np.ndarray:
    count = min(case.rows, max(2, _SAMPLED_ELEMENTS // case.cols))
    inner = np.random.default_rng(0).choice(case.rows, count, replace=False)
    return np.unique(np.concatenate([[0, case.rows - 1], inner[2:]]))


@jax.jit
def _take(leaf: jax.Array, rows: jax.Array) -> jax.Array:
    return leaf[rows]


def _truths(case: RowCase, operands: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """(true value, size of the terms it is a difference of) of each output."""
    if case.op in LOSSES:
        return _truths_of_loss(case, operands, case.rows)
    x, *rest = operands
    forward = {
        "softmax": lambda: (oracle.softmax(x), None),
        "log_softmax": lambda: (oracle.log_softmax(x), oracle.log_softmax_terms(x)),
        "logsumexp": lambda: (oracle.logsumexp(x, -1), None),
    }[case.op]
    if case.pass_ in ("fwd", "call"):
        return [forward()]
    (t,) = rest
    if case.op == "softmax":
        y = oracle.softmax(x)
        gradient = (oracle.softmax_tangent(y, t), oracle.softmax_tangent_terms(y, t))
    else:
        gradient = (oracle.log_softmax_cotangent(x, t), oracle.log_softmax_cotangent_terms(x, t))
    return [gradient] if case.pass_ == "bwd" else [forward(), gradient]


def every_row(case: RowCase) -> Any:
    """A jitted function of (operands, outputs): the largest deviation from the float32 reference, 1 being tolerated."""
    row = {"top_k": _top_k_row, "cross_entropy": _loss_row}.get(case.op, _plain_row)(case, _LOOSE_ULPS[case.dtype])

    def check(operands: tuple[jax.Array, ...], got: Any) -> jax.Array:
        leaves = jax.tree.leaves(got)
        batch = max(1, _CHECKED_ELEMENTS // case.cols)
        rows = (*operands, *(leaf for leaf in leaves if leaf.ndim))
        off, losses = jax.lax.map(lambda leaves: row(*leaves), rows, batch_size=batch)
        values = [_off(leaf, losses.mean(), jnp.abs(losses).mean(), _LOSS_ULPS) for leaf in leaves if not leaf.ndim]
        return jnp.stack([off.max(), *values]).max()

    return jax.jit(check)


def _plain_row(case: RowCase, ulps: float) -> Any:
    """A probability is compared with itself, what may be a difference of larger terms with the largest of its row."""

    def row(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, got, wants = x.astype(jnp.float32)[None], list(rest), []
        forward = getattr(reference, "stats" if case.op == "logsumexp" else case.op)(x, axes=(1,))
        if case.pass_ != "bwd":
            y = log_normalizer(forward) if case.op == "logsumexp" else forward
            wants.append((y, jnp.abs(y) if case.op == "softmax" else jnp.abs(y).max()))
        if case.pass_ in ("bwd", "value_and_vjp"):
            t = got.pop(0)
            gradient = {"softmax": reference.softmax_tangent, "log_softmax": reference.log_softmax_cotangent}[case.op]
            dx = gradient(forward if case.op == "softmax" else x, t.astype(jnp.float32)[None], axes=(1,))
            wants.append((dx, jnp.abs(dx).max()))
        offs = [_off(y[None], want, size, ulps, case.dtype) for y, (want, size) in zip(got, wants, strict=True)]
        return jnp.stack(offs).max(), jnp.zeros(())

    return row


def _truths_of_loss(case: RowCase, operands: list[np.ndarray], rows: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """(true value, size of the terms) of each output that has rows, for the rows given of a case's `rows`."""
    if case.op == "top_k":
        (x,) = operands
        best = np.argsort(-x.astype(np.float32), axis=-1, kind="stable")[:, : case.options["k"]]
        return [(np.take_along_axis(oracle.softmax(x), best, -1), None), (best, None)]
    weights = 1.0 if case.pass_ == "fwd" else 1 / rows
    true = oracle.cross_entropy(*operands, **_row(case), weights=weights, ignored=case.options.get("ignore_index"))
    if case.pass_ != "fwd":
        return [(true.gradient, true.gradient_terms)]
    # The label's logit is taken from the logsumexp; a capped one errs by as much as the cap would.
    return [(true.loss, true.loss_terms + np.abs(true.lse) + (_row(case)["soft_cap"] or 0.0))]


def _row(case: RowCase) -> dict[str, Any]:
    """The options as the kernels' layer names them."""
    names = {"label_smoothing": ("smoothing", 0.0), "z_loss": ("z_loss", 0.0), "logits_soft_cap": ("soft_cap", None)}
    return {name: case.options.get(option, default) for option, (name, default) in names.items()}


def _loss_row(case: RowCase, ulps: float) -> Any:
    options = _row(case)
    cap, smoothing, z_loss = (options[name] for name in ("soft_cap", "smoothing", "z_loss"))

    def row(x: jax.Array, y: jax.Array, got: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x.astype(jnp.float32)[None]
        ignored = y == case.options.get("ignore_index")
        weight = jnp.full((1, 1), 1 / case.rows)
        label = jnp.where(ignored, IGNORED, y)[None, None]
        gradient, *numbers = reference.cross_entropy_gradient(x, label, weight, axes=(1,), **options)
        lse = log_normalizer(Stats(*numbers[:2]))[0]
        at_label = reference.logits(x[0, jnp.where(ignored, 0, y)], 1.0, cap)
        loss = lse - (1 - smoothing) * at_label + z_loss * lse**2
        if smoothing:
            loss -= smoothing / case.cols * numbers[2][0]
        loss = jnp.where(ignored, 0.0, loss)
        if not got.ndim:
            return _off(got, loss, jnp.abs(lse) + jnp.abs(at_label) + (cap or 0.0), _LOSS_ULPS), loss
        size = jnp.abs(gradient) + 2 * smoothing / case.cols * weight
        return _off(got[None], gradient, size, ulps, case.dtype), loss

    return row


def _top_k_row(case: RowCase, ulps: float) -> Any:
    """The k-th has k - 1 before it, and each is before the next: what `lax.top_k` of the logits means."""

    def row(x: jax.Array, got: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = jnp.arange(case.cols)
        known = (at >= 0) & (at < case.cols)
        best = x[jnp.where(known, at, 0)]
        descend = (best[:-1] > best[1:]) | ((best[:-1] == best[1:]) & (at[:-1] < at[1:]))
        before = ((x > best[-1]) | ((x == best[-1]) & (columns <= at[-1]))).sum()
        right = known.all() & descend.all() & (before == at.size)
        want = reference.softmax(x.astype(jnp.float32), axes=(0,))[jnp.where(known, at, 0)]
        return jnp.where(right, _off(got, want, want, ulps, case.dtype), jnp.inf), jnp.zeros(())

    return row


def _off(got: jax.Array, want: jax.Array, size: jax.Array, ulps: float, dtype: str = "float32") -> jax.Array:
    info = jnp.finfo(dtype)
    # Not below what float32 has as a normal number: 0 / 0 is no deviation.
    allowed = jnp.maximum(ulps * float(info.eps) * jnp.maximum(size, float(info.tiny)), jnp.finfo(jnp.float32).tiny)
    off = jnp.abs(got.astype(jnp.float32) - want) / allowed
    return jnp.where(jnp.isnan(off), jnp.inf, off).max()


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
    found = jax.lax.map(of_pair, jnp.arange(shape.batch * shape.key_heads), batch_size=at_once)
    exact, plain = jax.tree.map(lambda x: x.reshape(shape.batch, shape.key_heads, *x.shape[1:]), found)
    return {name: (exact[name], plain[name]) for name in exact}


@jax.jit(static_argnames="shape")
def _head_errors(shape: Shape, got: Mapping[str, jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]) -> Any:
    """Of each output, the errors of what is judged and of XLA's in 16 bits, `[2, batch, heads]`."""

    def pair(name: str) -> jax.Array:
        want, xla = truths[name]
        found = jnp.stack([_head_error(x.astype(jnp.float32), want) for x in (_by_head(shape, got[name]), xla)])
        return found.reshape(2, shape.batch, -1)

    return {name: pair(name) for name in got}


def _head_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """The relative error of each head."""
    rows, sizes = ((x**2).mean(-1) for x in (got - want, want))
    size = sizes.mean(-1)
    # A row may be nearly zero, as the first queries' gradients are under a causal mask.
    worst_row = (rows / jnp.maximum(sizes, size[..., None])).max(-1)
    return jnp.sqrt(jnp.maximum(rows.mean(-1) / size, worst_row * ROW_WEIGHT**2))


def judge_attention(
    shape: Shape, got: Sequence[jax.Array], truths: Mapping[str, tuple[jax.Array, jax.Array]]
) -> Verdict:
    """Compares a program's outputs with the truth."""
    names = NAMES[len(got)]
    errors = jax.device_get(
        _head_errors(shape, dict(zip(names, got, strict=True)), {name: truths[name] for name in names})
    )
    return worst_head({name: found.tolist() for name, found in errors.items()}, shape.dtype)


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
        ids = operands["segments"][sequence]
        seen &= ids[:, None] == ids[None, :]
    return seen & operands["mask"][sequence, 0] if shape.kind == "mask" else seen
