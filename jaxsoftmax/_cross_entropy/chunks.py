"""One device's part of the loss of `hidden @ weight`: chunks of tokens, whose logits are the only array of their size.

XLA computes the products, in float32 from operands of 16 bits, and this package's own loss reads a chunk's logits. A
chunk's gradient logits have the operands' dtype; two more products make the gradients of it, and what is summed over
tokens is summed in float32. A kernel reads the logits for the rows' states; XLA writes the gradient from these. On
Hopper a kernel multiplies where it can, and stores no logits but their weights in 16 bits (`linear_kernel`).

The operands have names, and `linear_kernel` says what axes each has. Here `t`, the tokens, is one axis. If the
vocabulary is sharded, the devices exchange a few numbers a token (`merged`); `Parts` says what this device has.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core import numbers, recorder
from jaxsoftmax._core.checks import DTypeLike
from jaxsoftmax._core.sharding import all_gather, unify_varying
from jaxsoftmax._cross_entropy import linear_kernel
from jaxsoftmax._cross_entropy import loss as row_losses
from jaxsoftmax._cross_entropy.linear_kernel import COLUMNS, COTANGENT, TANGENT, Operands, Parts, Rules
from jaxsoftmax._cross_entropy.primitives import factors, losses, of_gradient, zero_ignored
from pallas_kernels import hardware
from pallas_kernels.monoid import Stats, decay
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED
from pallas_kernels.types import accumulator_dtype

Count = jax.Array | int | None
Body = Callable[[Operands], tuple[Operands, Operands]]

BYTES = 2**30  # what a chunk's logits and their gradient may take together
KERNEL_BYTES = 2**31  # what the kernel's weights may take, whose place the gradient takes
_MULTIPLE = 128  # rows of a tile of a matrix product


def chunk_size(tokens: int, vocabulary: int, bytes_each: int, asked: int | None, bytes_of_all: int = BYTES) -> int:
    """Returns the tokens of a chunk whose logits take `bytes_each`: few chunks, little padding, within `bytes_of_all`.

    Adding a chunk's part to the weight's gradient takes about as long as the products of another `_MULTIPLE` tokens.
    """
    most = asked or max(bytes_of_all // max(vocabulary * bytes_each, 1), 1)
    if tokens <= most or asked:
        return min(tokens, most)
    sizes = range(_MULTIPLE, max(most, _MULTIPLE) + 1, _MULTIPLE)
    return min(sizes, key=lambda size: math.ceil(tokens / size) * (size + _MULTIPLE))


def _chunk_size_of(rules: Rules, operands: Operands, bytes_each: int, bytes_of_all: int = BYTES) -> int:
    """Returns the tokens of a chunk of a call's operands; all where shapes are symbols."""
    tokens, vocabulary = operands["labels"].shape[0], rules.vocabulary(operands["weight"].shape)
    if not isinstance(tokens, int) or not isinstance(vocabulary, int):
        return tokens
    return chunk_size(tokens, vocabulary, bytes_each, rules.chunk_size, bytes_of_all)


def in_words(tokens: int, size: int) -> str:
    """Says how many chunks of `size` tokens there are."""
    is_one = size == tokens or size >= tokens
    return "one chunk of all tokens" if is_one else f"{math.ceil(tokens / size)} chunks of {size} tokens"


def _over_chunks(body: Body, rules: Rules, operands: Operands, size: int) -> tuple[Operands, Operands]:
    """Runs `body` on chunks of `size` tokens: adds up its first results, and concatenates the others along tokens."""
    tokens = operands["labels"].shape[0]
    recorder.note(in_words(tokens, size))
    by_token = {n: x for n, x in operands.items() if rules.has_tokens(n) and x.shape[0] == tokens}
    shared = {n: x for n, x in operands.items() if n not in by_token}
    if size == tokens:
        return body(operands)
    chunks = math.ceil(tokens / size)
    missing = chunks * size - tokens
    # A derivative of this computes a chunk's logits again, and keeps none.
    each = jax.checkpoint(lambda piece, shared: body(piece | shared))

    def padded(name: str, x: jax.Array) -> jax.Array:
        if missing:
            fill = IGNORED if name == "labels" else 1 if name == "sum" else 0
            x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return x.reshape(chunks, size, *x.shape[1:])

    def step(sums: Operands, piece: Operands) -> tuple[Operands, Operands]:
        more, rows = each(piece, shared)
        return {name: x + more[name] for name, x in sums.items()}, rows

    pieces = {name: padded(name, x) for name, x in by_token.items()}
    first = {name: x[0] for name, x in pieces.items()}
    sums, _ = jax.eval_shape(each, first, shared)
    witness = next(iter(first.values()))
    start = {name: unify_varying(jnp.zeros(x.shape, x.dtype), witness)[0] for name, x in sums.items()}
    sums, rows = jax.lax.scan(step, start, pieces)
    return sums, {name: x.reshape(chunks * size, *x.shape[2:])[:tokens] for name, x in rows.items()}


def _product(rules: Rules, names: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes the product of two matrices whose axes are named, as in "te,ev->tv", by one untransposed operation."""
    ins, out = names.split("->")
    of_a, of_b = ins.split(",")
    (along,) = set(of_a) & set(of_b)
    dims = (((of_a.index(along),), (of_b.index(along),)), ((), ()))
    c = jax.lax.dot_general(a, b, dims, precision=rules.precision, preferred_element_type=dtype)
    return c if of_a.replace(along, "") == out[0] else c.T


def _raw(rules: Rules, operands: Operands) -> jax.Array:
    """Returns the logits of a chunk of tokens before the scale: `hidden @ weight + bias`."""
    wide = accumulator_dtype(operands["hidden"].dtype)
    x = _product(rules, f"te,{rules.axes('weight')}->tv", operands["hidden"], operands["weight"], wide)
    return x + operands["bias"].astype(wide) if "bias" in operands else x


def _logits(rules: Rules, operands: Operands) -> jax.Array:
    """Returns the logits of a chunk before a scale and a soft cap that are constants."""
    return _capped(_scaled(_raw(rules, operands), operands), operands)


def _scaled(x: jax.Array, operands: Operands) -> jax.Array:
    return x * operands["scale"][:, None] if "scale" in operands else x


def _capped(x: jax.Array, operands: Operands) -> jax.Array:
    return numbers.capped(x, operands["cap"][:, None]) if "cap" in operands else x


def _column(operands: Mapping[str, jax.Array], name: str) -> jax.Array:
    return operands[name][:, None]


def _where(operands: Operands) -> list[jax.Array]:
    return [operands["where"]] if "where" in operands else []


def _row_terms(rules: Rules, x: jax.Array, operands: Operands, local: jax.Array) -> Operands:
    """Returns the terms of a chunk's losses, from this device's logits; `local` are the labels among these."""
    labels, where, row = operands["labels"][:, None], _where(operands), rules.row
    vocabulary = x.shape[1]
    # A label of 0 stands for any: the loss itself is computed of the whole row.
    reading = jnp.zeros_like(labels) if rules.all_rows else jnp.where(labels == IGNORED, IGNORED, 0)
    if vocabulary == 0:
        maximum, total = (jnp.full(x.shape[:1], fill, x.dtype) for fill in (-jnp.inf, 0.0))
    else:
        alone = {"weighted": False, "stats": True, "all_rows": False, "implementation": rules.implementation}
        _, maximum, total = losses(x, reading, *where, **row | {"smoothing": 0.0}, z_loss=0.0, **alone)
    here = (local >= 0) & (local < vocabulary)
    label = jnp.zeros_like(maximum)
    if vocabulary:
        picked = row_losses.label_logit_gathered(x, jnp.where(here, local, 0)[:, None], **row)
        label = jnp.where(here, picked if where else reference.below(picked, maximum), 0.0)
    terms = {"max": maximum, "sum": total, "label": label}
    if rules.smoothing:
        z = reference.logits(zero_ignored(x, labels, where, COLUMNS), rules.scale, rules.soft_cap)
        terms["total"] = (jnp.where(where[0], z, 0.0) if where else z).sum(1)
        count = jnp.broadcast_to(reference.column_count(x, where[0] if where else None, COLUMNS), (len(x), 1))
        terms["count"] = count[:, 0].astype(x.dtype)
    if "entropy" in rules.results:
        terms["entropy_sum"] = _entropy_sum(rules, x, maximum[:, None], where)
    return terms


def _entropy_sum(rules: Rules, x: jax.Array, maximum: jax.Array, where: list[jax.Array]) -> jax.Array:
    """Returns `sum(exp(z - max) * (z - max))` of each row, to which a logit of -inf adds nothing."""
    distance = reference.below(reference.logits(x, rules.scale, rules.soft_cap), maximum) - maximum
    counts = distance > -jnp.inf
    for mask in where:
        counts = counts & mask
    distance = jnp.where(counts, distance, 0.0)
    return jnp.where(counts, decay(distance, jnp.zeros_like(maximum)) * distance, 0.0).sum(1)


def merged(row_terms: Operands, parts: Parts) -> Operands:
    """Merges the terms of parts of rows, by one exchange of a few numbers a row if the vocabulary is sharded."""
    names = parts.vocabulary.names
    if not names:
        return row_terms
    gathered = dict(zip(row_terms, all_gather(names, *row_terms.values()), strict=True))
    maximum, total = gathered["max"], gathered["sum"]
    largest = maximum.max(0)
    shrunk = decay(maximum, largest[None])
    out = {"max": largest, "sum": (total * shrunk).sum(0)}
    out |= {name: x.sum(0) for name, x in gathered.items() if name in ("label", "total", "count")}
    if "entropy_sum" in gathered:
        nearer = jnp.where(total == 0, 0.0, total * (jnp.where(total == 0, 0.0, maximum) - largest))
        out["entropy_sum"] = jnp.where(total == 0, 0.0, shrunk * (gathered["entropy_sum"] + nearer)).sum(0)
    return out


def losses_of(rules: Rules, row_terms: Operands, labels: jax.Array) -> Operands:
    """Returns the losses, states and entropies of tokens from the terms of their rows."""
    stats = Stats(row_terms["max"], row_terms["sum"])
    terms = row_losses.RowTerms(stats, row_terms["label"], row_terms.get("total"), row_terms.get("count", 0))
    row = {"axes": (), "smoothing": rules.smoothing, "z_loss": rules.z_loss}
    results = {"loss": row_losses.loss_of_terms(terms, labels, **row), "max": stats.max, "sum": stats.sum}
    if "entropy_sum" in row_terms:
        # The logarithm of an empty row is undefined; its entropy is 0.
        total = jnp.where(stats.sum == 0, 1.0, stats.sum)
        negated = row_terms["entropy_sum"] / total - jnp.log(total)
        # The terms of logits far apart cancel, and their rounded difference may have the other sign.
        results["entropy"] = 0.0 - reference.below(negated, jnp.zeros_like(negated))
    return results


def _factors(
    rules: Rules, operands: Operands, cotangents: Mapping[str, jax.Array]
) -> tuple[Stats, jax.Array, jax.Array]:
    """Returns the rows' states, and a and b of their gradients `a * softmax - b * onehot(label)`."""
    state = Stats(_column(operands, "max"), _column(operands, "sum"))
    of_loss, of_lse = (_column(cotangents, name) if name in cotangents else None for name in ("loss", "lse"))
    return state, *factors(state, _column(operands, "labels"), of_loss, of_lse, rules.z_loss)


def _slopes(
    rules: Rules, x: jax.Array, operands: Operands, local: jax.Array, cotangents: Mapping[str, jax.Array], count: Count
) -> jax.Array:
    """Returns the gradient of a chunk's logits for cotangents of the losses, logsumexps and entropies, in one loop."""
    labels, where = operands["labels"][:, None], _where(operands)
    read = labels != IGNORED
    state, prob_factor, label_factor = _factors(rules, operands, cotangents)
    if rules.all_rows:
        # Such a row is read, but no column is its label.
        local = jnp.where(read[:, 0], local, x.shape[1])
    else:
        x = zero_ignored(x, labels, (), COLUMNS)
    if where:
        x = jnp.where(where[0] | (reference.columns(x, COLUMNS) == local[:, None]), x, 0.0)
    if "entropy" in cotangents:
        z = reference.below(reference.logits(x, rules.scale, rules.soft_cap), state.max)
        log_p = z - state.max - jnp.log(state.sum)
        log_p = jnp.where(log_p > -jnp.inf, log_p, 0.0)
        prob_factor = prob_factor - _column(cotangents, "entropy") * (log_p + _column(operands, "entropy"))
    mask = where[0] if where else None
    return reference.cross_entropy_slope(
        x, local[:, None], mask, prob_factor, label_factor, state, **rules.row, count=count
    )


def _local_labels(labels: jax.Array, vocabulary: int, parts: Parts) -> jax.Array:
    """Returns labels among this device's columns, `IGNORED`, or past the last column."""
    return row_losses.local_labels(labels, [parts.vocabulary], [vocabulary]) if parts.vocabulary.names else labels


def _cotangents(operands: Operands) -> Operands:
    """Returns the cotangents of unweighted losses, logsumexps and entropies."""
    given = {n.removeprefix(COTANGENT): x for n, x in operands.items() if n.startswith(COTANGENT)}
    if "weights" in operands and "loss" in given:
        given["loss"] = of_gradient(operands["weights"], given["loss"], ())
    return given


def _count(rules: Rules, operands: Operands, parts: Parts, vocabulary: int) -> Count:
    """Counts the columns that the rows of a chunk have on all devices, for smoothed labels."""
    names = parts.vocabulary.names
    if not rules.smoothing or not (names or "where" in operands):
        return None
    if "where" not in operands:
        return parts.vocabulary.extent
    wide = accumulator_dtype(operands["hidden"].dtype)
    counts = jnp.broadcast_to(operands["where"], (operands["where"].shape[0], vocabulary)).sum(1, dtype=wide)
    return (jax.lax.psum(counts, names) if names else counts)[:, None]


class _GradientPlan(NamedTuple):
    """Says which gradients are wanted, and how they are computed.

    `by_kernel`: a kernel computes the weights of logits. `sum_dtype`: that of a chunk's part of the weight's gradient.
    `unit`: what cotangents were divided by, and all gradients are to be multiplied by.
    """

    rules: Rules
    parts: Parts
    moving: tuple[str, ...]
    gives_loss: bool
    by_kernel: bool
    sum_dtype: np.dtype
    unit: jax.Array | None


def _chunk_gradients(
    plan: _GradientPlan,
    operands: Operands,
    g: jax.Array,
    of_rows: jax.Array | None,
    raw: jax.Array | None,
    counts: jax.Array,
) -> tuple[Operands, Operands]:
    """Computes the gradients of moving operands from that of a chunk's logits: sums over tokens, and the others.

    The sums are not multiplied by the unit yet. `of_rows`: factors of the rows of `g`, which then goes into the
    products as it is. `counts`: the tokens that have a cotangent; the rows of the others are 0, or have a factor of 0.
    """
    rules, moving = plan.rules, plan.moving
    hidden, weight = operands["hidden"], operands["weight"]
    wide, sums, rows = accumulator_dtype(hidden.dtype), {}, {}
    if "cap" in operands and raw is not None:
        g, of_cap = jax.vjp(numbers.capped, _scaled(raw, operands), _column(operands, "cap"))[1](g)
        rows |= {"cap": of_cap[:, 0]} if "cap" in moving else {}
    if "scale" in moving and raw is not None:
        rows["scale"] = _dot(g, raw)
    g = _scaled(g, operands)
    narrow = g.astype(hidden.dtype)
    if "bias" in moving:
        sums["bias"] = g.sum(0)
    if "weight" in moving:
        hidden = jnp.where(counts[:, None], hidden, jnp.zeros_like(hidden))
        if of_rows is not None:
            hidden = (hidden * of_rows[:, None]).astype(hidden.dtype)
        if rules.transposed:
            sums["weight"] = _product(rules, "tv,te->ve", narrow, hidden, plan.sum_dtype)
        else:
            sums["weight"] = _product(rules, "te,tv->ev", hidden, narrow, plan.sum_dtype)
    if "hidden" in moving:
        if "weight" in moving and plan.parts.token_names:
            # Devices add up the weight's gradient beside the product that comes after it.
            narrow, sums["weight"] = jax.lax.optimization_barrier((narrow, sums["weight"]))
        # Parts of a sum over devices are not rounded yet.
        dtype = wide if plan.parts.vocabulary.names else hidden.dtype
        rounded = of_rows is None and plan.unit is None
        x = _product(rules, f"tv,{rules.axes('weight')}->te", narrow, weight, dtype if rounded else wide)
        x = x if of_rows is None else jnp.where(of_rows[:, None] == 0, 0.0, x * of_rows[:, None])
        rows["hidden"] = (x if plan.unit is None else x * plan.unit).astype(dtype)
    if plan.unit is not None:
        rows |= {name: x * plan.unit for name, x in rows.items() if name != "hidden"}
    return sums, rows


def _body_gradient(plan: _GradientPlan, token_chunk: Operands) -> tuple[Operands, Operands]:
    """Computes the gradients of a chunk's tokens; with `gives_loss` also losses, whose cotangents are the weights."""
    rules, parts, _, gives_loss, *_ = plan
    vocabulary = rules.vocabulary(token_chunk["weight"].shape)
    local = _local_labels(token_chunk["labels"], vocabulary, parts)
    if plan.by_kernel:
        raw = None
        row_terms, weights = linear_kernel.terms_and_weights(rules, token_chunk, local)

        def slopes(operands: Operands, cotangents: Operands, counts: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            state, prob_factor, label_factor = jax.tree.map(lambda x: x[:, 0], _factors(rules, operands, cotangents))
            here = jnp.where(local < vocabulary, local, IGNORED)
            slope, of_rows = linear_kernel.slopes(rules, weights, state, prob_factor, label_factor, here, counts)
            return slope[: len(local), :vocabulary], of_rows
    else:
        raw = _raw(rules, token_chunk)
        x = _capped(_scaled(raw, token_chunk), token_chunk)
        row_terms = _row_terms(rules, x, token_chunk, local) if gives_loss else {}

        def slopes(operands: Operands, cotangents: Operands, counts: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            g = _slopes(rules, x, operands, local, cotangents, _count(rules, operands, parts, vocabulary))
            return jnp.where(counts[:, None], g, 0.0), None

    if gives_loss:
        results = losses_of(rules, merged(row_terms, parts), token_chunk["labels"])
        token_chunk, cotangents = token_chunk | {n: results[n] for n in rules.states}, {"loss": token_chunk["weights"]}
    else:
        results, cotangents = {}, _cotangents(token_chunk)
    # The gradient of a token without a cotangent is 0, whatever its hidden state is.
    reads = {"loss": token_chunk["labels"] != IGNORED}
    counts = functools.reduce(jnp.logical_or, [(ct != 0) & reads.get(n, True) for n, ct in cotangents.items()])
    g, of_rows = slopes(token_chunk, cotangents, counts)
    sums, rows = _chunk_gradients(plan, token_chunk, g, of_rows, raw, counts)
    return sums, rows | {n: results[n] for n in ("loss", "max", "sum") if n in results}


def forward(rules: Rules, parts: Parts, operands: Operands, *, may_run_kernel: bool = False) -> Operands:
    """Returns losses, states and entropies."""

    def body(token_chunk: Operands) -> tuple[Operands, Operands]:
        x = _logits(rules, token_chunk)
        return {}, _row_terms(rules, x, token_chunk, _local_labels(token_chunk["labels"], x.shape[1], parts))

    needed = {n: x for n, x in operands.items() if n != "weights"}
    wide = accumulator_dtype(operands["hidden"].dtype)
    if may_run_kernel and linear_kernel.decide(rules, needed, hardware.current()).chosen:
        local = _local_labels(operands["labels"], rules.vocabulary(operands["weight"].shape), parts)
        row_terms = linear_kernel.row_terms(rules, needed, local)
    else:
        _, row_terms = _over_chunks(body, rules, needed, _chunk_size_of(rules, needed, wide.itemsize))
    results = losses_of(rules, merged(row_terms, parts), operands["labels"])
    if "weights" in operands:
        results["loss"] = operands["weights"] * results["loss"]
    return results


def gradient(
    rules: Rules,
    parts: Parts,
    operands: Operands,
    *,
    moving: tuple[str, ...],
    gives_loss: bool = False,
    may_run_kernel: bool = False,
) -> Operands:
    """Returns gradients of moving operands for the given cotangents; with `gives_loss` the losses and states."""
    hidden = operands["hidden"]
    wide = accumulator_dtype(hidden.dtype)
    unit = None
    if hidden.dtype == jnp.float16:
        given = ["weights"] if gives_loss else [n for n in operands if n.startswith(COTANGENT)]
        unit = _loss_scale([operands["weights"]] if gives_loss else [*_cotangents(operands).values()])
        operands = operands | {n: operands[n] / unit for n in given}
    decide = functools.partial(linear_kernel.decide, rules, operands, hardware.current(), for_gradient=True)
    by_kernel = may_run_kernel and decide().chosen is not None
    if by_kernel:
        size = _chunk_size_of(rules, operands, hidden.dtype.itemsize, KERNEL_BYTES)
    else:
        size = _chunk_size_of(rules, operands, hidden.dtype.itemsize + wide.itemsize)
    reduce_dtype = rules.reduce_dtype or hidden.dtype
    is_sum = size != operands["labels"].shape[0]
    sum_dtype = wide if is_sum or unit is not None else reduce_dtype if parts.token_names else hidden.dtype
    plan = _GradientPlan(rules, parts, moving, gives_loss, by_kernel, sum_dtype, unit)
    sums, rows = _over_chunks(functools.partial(_body_gradient, plan), rules, operands, size)
    gradients = sums | rows
    for name in moving:
        names = parts.vocabulary.names if name in rows else parts.token_names
        # The unit is this device's own.
        part = gradients[name] if name in rows or unit is None else gradients[name] * unit
        part = part.astype(reduce_dtype) if names and name == "weight" else part
        gradients[name] = (jax.lax.psum(part, names) if names else part).astype(operands[name].dtype)
    return gradients


def _loss_scale(cotangents: Sequence[jax.Array]) -> jax.Array:
    """Returns the power of 2 by which cotangents are divided, so that float16 holds the gradient of the logits."""
    most = jax.lax.stop_gradient(jnp.stack([jnp.abs(ct).max(initial=0.0) for ct in cotangents]).max())
    exponent = jnp.frexp(most)[1]
    return jnp.where((most > 0) & jnp.isfinite(most), jnp.ldexp(jnp.ones_like(most), exponent), 1.0)


def tangent(rules: Rules, parts: Parts, operands: Operands) -> Operands:
    """Returns the tangents of losses, logsumexps and entropies for the tangents among the operands."""
    moving = [n.removeprefix(TANGENT) for n in operands if n.startswith(TANGENT)]

    def body(token_chunk: Operands) -> tuple[Operands, Operands]:
        of = lambda *moved: _logits(rules, token_chunk | dict(zip(moving, moved, strict=True)))
        x, t = jax.jvp(of, [token_chunk[n] for n in moving], [token_chunk[TANGENT + n] for n in moving])
        local = _local_labels(token_chunk["labels"], x.shape[1], parts)
        count, one = _count(rules, token_chunk, parts, x.shape[1]), jnp.ones_like(token_chunk["max"])
        slope = lambda name: _slopes(rules, x, token_chunk, local, {name: one}, count)
        return {}, {name: _dot(slope(name), t) for name in rules.results}

    wide = accumulator_dtype(operands["hidden"].dtype)
    _, tangents = _over_chunks(body, rules, operands, _chunk_size_of(rules, operands, 2 * wide.itemsize))
    if names := parts.vocabulary.names:
        tangents = {name: jax.lax.psum(x, names) for name, x in tangents.items()}
    if "weights" in operands:
        tangents["loss"] = of_gradient(operands["weights"], tangents["loss"], ())
    return tangents


def _dot(slope: jax.Array, t: jax.Array) -> jax.Array:
    """Returns the sum of the products of each row, to which a slope of 0 adds nothing."""
    return jnp.where(slope == 0, 0.0, slope * t).sum(1)
