"""Faults of top-k, of the losses and of sharded columns, in functions of this library, and the checks that reject them.

The case of a fault of a loss is the check itself.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import _top_k, linear_cross_entropy
from jaxsoftmax._attention import sequence
from jaxsoftmax._attention import sharding as attention_sharding
from jaxsoftmax._core import axes
from jaxsoftmax._cross_entropy import chunks, linear_primitives, primitives
from jaxsoftmax._cross_entropy import loss as row_losses
from jaxsoftmax._softmax import primitives as row_primitives
from pallas_kernels import monoid
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import reference
from tests import errors, oracle, top_k_oracle
from tests.faults import Fault, Table
from tests.jaxsoftmax import test_columns, test_sequence
from tests.jaxsoftmax import test_linear_cross_entropy as tested
from tests.jaxsoftmax.sharded import mesh, put
from tests.jaxsoftmax.test_linear_cross_entropy import TOKENS, VOCABULARY, case, check


class TopK(NamedTuple):
    """A call of `top_k_softmax`; `counts` as a GPU does of few rows."""

    counts: bool = False
    n: int = 4096
    k: int = 8
    normalize: str = "all"
    scale: float = 1.0


def check_top_k(fault: Fault) -> None:
    check_case(fault.case)


def check_case(case: TopK) -> None:
    """Of 16 bits where it counts: a CPU merges the state chunk after chunk."""
    run = jax.jit(_top_k.top_k_softmax, static_argnums=1, static_argnames=("normalize", "scale"))
    mlir.register_lowering(_top_k.TOP_K, functools.partial(_top_k.lower, may_count=case.counts), platform="cpu")
    try:
        x = top_k_oracle.rows(case.n, ml_dtypes.bfloat16 if case.counts else np.float32)
        for rows in np.split(x, len(x) // 4) if case.counts else [x]:
            top_k_oracle.check(run, rows, case.k, normalize=case.normalize, scale=case.scale)
    finally:
        mlir.register_lowering(_top_k.TOP_K, _top_k.lower, platform="cpu")


def _top(words: str, original: Any, fault: Callable[..., Any], **call: Any) -> Fault:
    return Fault(words, original, fault, TopK(**call), inside=_top_k)


_counted = functools.partial(_top, counts=True)


def _last_comes_first(top_k, x, k):
    values, indices = top_k(x[..., ::-1], k)
    return values, x.shape[-1] - 1 - indices


def _with_indices(of):
    """The selection with indices that are `of(indices, columns of a chunk)`."""

    def select(function, chunks, *arguments, **keywords):
        values, indices, *rest = function(chunks, *arguments, **keywords)
        return [values, of(indices, chunks.shape[-1]), *rest]

    return select


def _without_last_chunk(stats):
    return Stats(stats.max.at[..., -1].set(-jnp.inf), stats.sum.at[..., -1].set(0))


def _without_place(first_chunk, stats):
    chosen, *row = first_chunk(stats)
    return [0 * chosen, *row]


def _negated(part):
    """The earlier one of two whose values, part 0, or places, part 1, are negated."""

    def negate(parts):
        return [-x if i == part else x for i, x in enumerate(parts)]

    return lambda earlier, a, b: negate(earlier(negate(a), negate(b)))


TOP_K_FAULTS = (
    _top("the chosen chunks stay in the order of their maxima", jnp.sort, lambda sort, x, axis, **_: x),
    _top("of equal logits the last comes first", _top_k._lax_top_k, _last_comes_first, n=300),
    _top("of equal candidates the last comes first", _top_k.largest_in,
         _with_indices(lambda i, c: i // c * c + c - 1 - i % c)),
    _top("one chunk too few", jnp.sort, lambda sort, x, axis, **_: sort(x.at[..., -1].set(0), axis)),
    _top("the row's state lacks a chunk", monoid.merge_over,
         lambda merge, stats, axis, **k: merge(_without_last_chunk(stats), axis, **k)),
    _top("a row is normalised by its first chunk", monoid.merge_over,
         lambda merge, stats, axis, **_: Stats(*(part[..., 0] for part in stats))),
    _top("chunks are filled up with zeros", jnp.pad, lambda pad, x, widths, **_: pad(x, widths), n=5003),
    _top("the last chunk is left out", _top_k.chunked, lambda chunked, x, c: chunked(x[..., : x.shape[-1] // c * c], c),
         n=5003),
    _top("zeros of either sign are ordered", _top_k.comparable, lambda comparable, x, scale=1.0: x),
    _top("candidates are compared without the scale", _top_k.largest_in,
         lambda largest_in, chunks, maxima, k, *_: largest_in(chunks, maxima, k), scale=0.5),
    _top("probabilities of all are among the selected", _top_k.top_k_softmax,
         lambda function, *a, **k: function(*a, **k | {"normalize": "top_k"})),
    _top("probabilities among the selected are of all", _top_k.top_k_softmax,
         lambda function, *a, **k: function(*a, **k | {"normalize": "all"}), normalize="top_k"),
    _top("a NaN that is not selected is not seen", jnp.isnan, lambda isnan, x: isnan(x) & False, normalize="top_k"),
    _top("the scale is left out", _top_k.scaled, lambda scaled, x, factor: (scaled(x, factor)[0], 1.0), scale=0.5),
    _top("indices are those within a chunk", _top_k.largest_in, _with_indices(lambda i, c: i % c)),
    _counted("counted: of equal ones the last comes first", _top_k._is_of_rank,
             lambda is_of_rank, keys, places, k: is_of_rank(keys, -places, k)),
    _counted("counted: equal ones are of one rank", _top_k._is_of_rank,
             lambda is_of_rank, keys, places, k: is_of_rank(keys, 0 * places, k)),
    _counted("counted: the smallest come first", _top_k._is_of_rank,
             lambda is_of_rank, keys, places, k: is_of_rank(-keys, places, k)),
    _counted("counted: ranks begin at 1", _top_k._is_of_rank,
             lambda is_of_rank, *a: jnp.roll(is_of_rank(*a), 1, -2).at[..., 0, :].set(False)),
    _counted("counted: places are those within a chunk", _top_k.select_by_rank, _with_indices(lambda i, c: i % c)),
    _counted("counted: places have 16 bits", _top_k.select_by_rank, _with_indices(lambda i, c: i & 0xFFFF), n=70000,
             k=2),
    _counted("counted: candidates lack the scale", reference.logits, lambda logits, x, scale: logits(x, 1.0),
             scale=0.5),
    _counted("counted: the row's state lacks a chunk", _top_k._first_chunks,
             lambda first, stats, k: [first(stats, k)[0], *first(_without_last_chunk(stats), k)[1:]]),
    _counted("counted: sums are added as they are", monoid.combine,
             lambda combine, a, b: Stats(jnp.maximum(a.max, b.max), a.sum + b.sum)),
    _counted("counted, k = 1: of equal ones the last is found", _top_k._earlier, _negated(1), k=1),
    _counted("counted, k = 1: the smallest is found", _top_k._earlier, _negated(0), k=1),
    _counted("counted, k = 1: the first chunk is searched", _top_k._first_chunk, _without_place, k=1),
)  # fmt: skip


def check_cotangents(offset: float, cap: float | None) -> None:
    """Cotangents of loss and logsumexp that differ from row to row; masked and ignored rows."""
    rng = np.random.default_rng(0)
    x = np.float32(3 * rng.normal(size=(6, 9)) + offset)
    y, where, ct, of_lse = np.array([0, 3, 8, -1, -1, 5]), rng.random((6, 9)) < 0.7, *rng.normal(size=(2, 6))
    # Of a row that is ignored, what the mask excludes may be anything.
    x[4, 0], where[4, 0] = np.nan, False
    want = oracle.cross_entropy(x, y, -1, where, soft_cap=cap, z_loss=1e-2, weights=ct, of_lse=of_lse, ignored=-1)

    @jax.jit
    @jax.grad
    def gradient(x: jax.Array) -> jax.Array:
        loss, lse = jaxsoftmax.softmax_cross_entropy_with_integer_labels(
            x, y, where=where, logits_soft_cap=cap, z_loss=1e-2, ignore_index=-1, return_lse=True
        )
        return (loss * ct + lse * of_lse).sum()

    assert errors.max_error(gradient(jnp.asarray(x)), want.gradient, magnitude=want.gradient_terms) < 16


def check_both() -> None:
    """Far from 0, where a float32 logsumexp has no digits to spare; and with a soft cap."""
    check_cotangents(1e4, None)
    check_cotangents(0.0, 5.0)


def _sum_in_maximum(stats, maximum, total):
    return stats(log_normalizer(stats(maximum, total)), jnp.ones_like(total))


def _with_label(pull, cts, x, labels, *arguments, **keywords):
    """The loss of ignored rows still has no gradient."""
    of_loss = jnp.where(labels < 0, 0.0, cts[0])
    return pull([of_loss, cts[1]], x, jnp.maximum(labels, 0), *arguments, **keywords)


_loss = functools.partial(Fault, case=check_both, inside=primitives)

LOSS_FAULTS = (
    _loss("a row's state is its logsumexp, rounded", Stats, _sum_in_maximum),
    _loss("the sum is left out", Stats, lambda stats, maximum, total: stats(maximum, jnp.ones_like(total))),
    _loss("the z loss has no gradient", reference.prob_factor_of, lambda weight, label_factor, *_: label_factor),
    _loss("the cotangent is left out", primitives._vjp_logits,
          lambda pull, cts, *a, **k: pull([jnp.ones_like(cts[0]), cts[1]], *a, **k)),
    _loss("the logsumexp's is left out", primitives._vjp_logits, lambda pull, cts, *a, **k: pull(cts[:1], *a, **k)),
    _loss("the logsumexp takes the loss's place", reference.prob_factor_of, lambda weight, factor, *_: 0 * factor),
    _loss("an ignored row's logsumexp is constant", primitives._vjp_logits,
          lambda pull, *a, **k: pull(*a, **k | {"all_rows": False})),
    _loss("an ignored row has a label", primitives._vjp_logits, _with_label),
    _loss("the mask is left out", reference.cross_entropy_slope,
          lambda slope, x, labels, mask, *a, **k: slope(x, labels, None, *a, **k)),
)  # fmt: skip


def check_loss(fault: Fault) -> None:
    fault.case()


SIZE = 5  # tokens of a chunk; 13 tokens are two chunks and a tail of 3
ALL = {"label_smoothing": 0.1, "z_loss": 0.1, "logits_soft_cap": 2.0, "return_lse": True, "return_entropy": True}


def check_all() -> None:
    rng = np.random.default_rng(5)
    more = {"bias": np.float32(rng.normal(size=VOCABULARY)), "where": rng.random((TOKENS, VOCABULARY)) < 0.8}
    more["scale"] = np.float32(rng.uniform(0.5, 2.0, (TOKENS, 1)))
    check(case() | more, ulps=64, chunk_size=SIZE, **ALL)


def check_weighted() -> None:
    weights = np.float32(np.random.default_rng(6).normal(size=TOKENS))
    for uniform in (True, False):
        check(case() | {"weights": weights}, ulps=64, chunk_size=SIZE, uniform=uniform)


def check_plain() -> None:
    check(case(), ulps=64, chunk_size=SIZE)


def check_16_bits() -> None:
    tested.test_of_16_bits_as_exact_as_optax_on_float32_logits(jnp.bfloat16, 1024, 8)


def check_sharded() -> None:
    """A vocabulary over devices, against one device."""
    arguments = case((8,), 6, 16)
    hidden, weight, labels = arguments.values()

    def total(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        found = linear_cross_entropy(hidden, weight, labels, chunk_size=4, **ALL)
        return sum((x * jnp.cos(jnp.arange(8.0))).sum() for x in found)

    both = jax.jit(jax.value_and_grad(total, (0, 1)))
    want = both(hidden, weight, labels)
    got = both(put(hidden, P("d"), mesh()), put(weight, P(None, "m"), mesh()), put(labels, P("d"), mesh()))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def _last_chunk_alone(over, body, rules, operands, each):
    """The gradient of the weight is that of the last chunk."""
    rows = over(body, rules, operands, each)[1]
    size = len(operands["labels"]) % SIZE
    piece = {n: x[-size:] if len(x) == len(operands["labels"]) else x for n, x in operands.items()}
    return body(piece)[0], rows


def _tail_counted(over, body, rules, operands, each):
    """What fills the last chunk up is counted, as copies of the last token."""
    sums, rows = over(body, rules, operands, each)
    last = {n: x[-1:] if len(x) == len(operands["labels"]) else x for n, x in operands.items()}
    return {n: x + 2 * body(last)[0][n] for n, x in sums.items()}, rows


def _label_off(over, body, rules, operands, each):
    """The labels of the last chunk are one off."""
    labels = operands["labels"]
    moved = jnp.where((jnp.arange(len(labels)) >= 10) & (labels > 0), labels - 1, labels)
    return over(body, rules, operands | {"labels": moved}, each)


def _flat_cap(slope, x, labels, *rest, soft_cap, scale, **row):
    """The derivative of the soft cap is left out."""
    z = chunks.reference.logits(x, scale, soft_cap)
    return slope(z, labels, *rest, scale=1.0, **row) * scale


def _half_precision(over, body, rules, operands, each):
    """What is summed over chunks is rounded after each."""
    total, rows = over(body, rules, operands, each)
    if "weight" not in total:
        return total, rows
    count = len(operands["labels"])
    pieces = {n: x.reshape(128, count // 128, *x.shape[1:]) for n, x in operands.items() if len(x) == count}

    def add(sums, piece):
        more = body(operands | piece)[0]
        return {n: x + more[n].astype(x.dtype) for n, x in sums.items()}, None

    sums, _ = jax.lax.scan(add, {n: jnp.zeros(x.shape, jnp.bfloat16) for n, x in total.items()}, pieces)
    return {n: x.astype(jnp.float32) for n, x in sums.items()}, rows


def _entropies_added(merged, terms, parts):
    found, names = merged(terms, parts), parts.vocabulary.names
    return found | {"entropy_sum": jax.lax.psum(terms["entropy_sum"], names)} if names else found


def _without(name):
    """Calls the function without the operand of this name."""
    drop = lambda x: {n: value for n, value in x.items() if n != name} if isinstance(x, dict) else x
    return lambda function, *arguments: function(*map(drop, arguments))


LINEAR_FAULTS = (
    Fault("the weight's gradient is not accumulated", chunks._over_chunks, _last_chunk_alone, check_plain),
    Fault("a chunk's tail is counted", chunks._over_chunks, _tail_counted, check_plain),
    Fault("labels of the last chunk are off", chunks._over_chunks, _label_off, check_plain),
    Fault("the soft cap's slope is lost", reference.cross_entropy_slope, _flat_cap, check_all),
    Fault("the z loss has no gradient", reference.prob_factor_of, lambda f, label_factor, *_: label_factor, check_all),
    Fault("the entropy lacks its logsumexp", chunks.losses_of,
          lambda f, rules, terms, labels: f(rules, terms, labels) | {"entropy": -terms["entropy_sum"] / terms["sum"]},
          check_all),
    Fault("the entropy's gradient lacks the entropy", chunks._slopes,
          lambda f, rules, x, operands, *a: f(rules, x, operands | {"entropy": 0 * operands["entropy"]}, *a),
          check_all),
    Fault("the logsumexp's cotangent is left out", chunks._slopes, _without("lse"), check_all),
    Fault("the bias is left out", chunks._raw, _without("bias"), check_all),
    Fault("the mask is left out", chunks._where, lambda f, operands: [], check_all),
    Fault("the scale is not in the gradient", chunks._chunk_gradients, _without("scale"), check_all),
    Fault("the weights are not in the gradient", chunks._cotangents, _without("weights"), check_weighted),
    Fault("cotangents that differ are taken for the same", jax.lax.cond, lambda cond, same, scaled, again: scaled(),
          check_weighted, inside=linear_primitives),
    Fault("ignored hidden states count", chunks._chunk_gradients,
          lambda f, pull, *given: f(pull, *given[:-1], jnp.ones_like(given[-1])), tested.test_rows_that_do_not_count),
    Fault("logits are rounded to 16 bits", chunks._raw,
          lambda f, rules, operands: f(rules, operands).astype(jnp.bfloat16).astype(jnp.float32), check_16_bits),
    Fault("the weight's gradient is accumulated in 16 bits", chunks._over_chunks, _half_precision, check_16_bits),
    Fault("a device's columns begin elsewhere", chunks._local_labels,
          lambda f, labels, vocabulary, parts: f(labels - (1 if parts.vocabulary.names else 0), vocabulary, parts),
          check_sharded),
    Fault("devices' sums are added as they are", monoid.decay,
          lambda decay, frm, to: jnp.ones_like(frm) if to.shape[:1] == (1,) else decay(frm, to),
          check_sharded, inside=chunks),
    Fault("devices' entropies are added as they are", chunks.merged, _entropies_added, check_sharded),
)  # fmt: skip


def _on_two_devices(local, labels, shardings, extents):
    cols = math.prod(extents)
    own, before = local(labels, shardings, extents), local(labels + cols, shardings, extents)
    return jnp.where((labels >= 0) & (own == cols), before, own)


def _next_column(local, labels, shardings, extents):
    return local(jnp.where(labels < 0, labels, labels + 1), shardings, extents)


def _one_lost(gather, names, *parts):
    return [part[1:] for part in gather(names, *parts)]


def _sum_lost(gather, names, *parts):
    """Of exchanges of one number: the sums of softmax's gradient."""
    return _one_lost(gather, names, *parts) if len(parts) == 1 else gather(names, *parts)


def _not_weighed(merge_over, state, axis):
    found = state[0].max(axis), *(part.sum(axis) for part in state[1:])
    return Stats(*found) if isinstance(state, Stats) else found


def _own_count(gradient, rows, x, labels, weights, known, count, where, **row):
    return gradient(rows, x, labels, weights, known, 1, where, **row)


def _own_columns(gather, names, values, indices, *stats):
    return gather(names, values, indices % 8, *stats)


def _in_another_order(gather, names, *parts):
    return [part[::-1] for part in gather(names, *parts)]


def _columns(words: str, module: Any, name: str, fault: Callable[..., Any], group: str) -> Fault:
    return Fault(words, getattr(module, name), fault, group, inside=module)


def check_columns(fault: Fault) -> None:
    if fault.case == "top_k":
        test_columns.check_top_k("uneven")
    else:
        test_columns.check(fault.case, "uneven")


COLUMNS_FAULTS = (
    _columns("a label counts on two devices", row_losses, "local_labels", _on_two_devices, "losses"),
    _columns("the columns of a device begin one early", row_losses, "local_labels", _next_column, "losses"),
    _columns("a device's numbers are lost", row_losses, "all_gather", _one_lost, "losses"),
    _columns("sums of devices are added unweighed", row_losses, "merge_over", _not_weighed, "losses"),
    _columns("smoothed labels are shared by fewer columns", row_losses, "gradient_of_part", _own_count, "losses"),
    _columns("padding counts beside a mask", axes, "inside_of", lambda inside, *_: None, "options"),
    _columns("padding counts", axes, "inside_of", lambda inside, *_: None, "rows"),
    _columns("a device's state is lost", row_primitives, "all_gather", _one_lost, "rows"),
    _columns("states of devices are added unweighed", row_primitives, "merge_over", _not_weighed, "rows"),
    _columns("a device's part of the row's product is lost", row_primitives, "all_gather", _sum_lost, "rows"),
    _columns("indices are those of a device's columns", _top_k, "all_gather", _own_columns, "top_k"),
    _columns("equal logits come in another order", _top_k, "all_gather", _in_another_order, "top_k"),
    _columns("a device's candidates are lost", _top_k, "all_gather", _one_lost, "top_k"),
)  # fmt: skip


class Sequence(NamedTuple):
    """A call over a sharded sequence, whose blocks of keys are gathered or passed round."""

    case: str
    ring: bool = False


def check_sequence(fault: Fault) -> None:
    check_sequence_case(fault.case)


def check_sequence_case(case: Sequence) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "SORT_BLOCK", test_sequence.T // 8)
        test_sequence.pass_round(patch, test_sequence.IN_A_RING if case.ring else test_sequence.GATHERED, case.case)
        test_sequence.check_sharded(case.case)


def _sequence(words: str, original: Any, fault: Callable[..., Any], case: str, *, ring: bool = False) -> Fault:
    return Fault(words, original, fault, Sequence(case, ring))


def _bias_of_last_block(added, gradients, sums, found):
    kinds = zip(gradients.results, added(gradients, sums, found), found, strict=True)
    return tuple(last if kind == "bias" else total for kind, total, last in kinds)


_ring = functools.partial(_sequence, ring=True)

SEQUENCE_FAULTS = (
    _sequence("the first query of a part is one further", sequence.of_indices,
              lambda f, arrays, rules, firsts, n: f(arrays, rules, (firsts[0] + 1, 0), n), "causal"),
    _sequence("a part's queries begin at 0", sequence.of_indices,
              lambda f, arrays, rules, firsts, n: f(arrays, rules, (0, 0), n), "window"),
    _sequence("sequences end where a part ends", sequence.of_indices,
              lambda f, arrays, rules, firsts, n: f(arrays, rules, firsts, (n[0] // 4, n[1])), "ends"),
    _sequence("keys' gradients are not reduced", attention_sharding._added,
              lambda f, entries, kind, x, *a: x[:, : x.shape[1] // 4] if kind == "key" else f(entries, kind, x, *a),
              "causal"),
    _sequence("keys' gradients are reduced twice", attention_sharding._added,
              lambda f, entries, kind, x, names: f(entries, kind, x, names) * (4 if kind == "key" else 1), "causal"),
    _sequence("sinks' gradients are of a part of the queries", attention_sharding._added,
              lambda f, entries, kind, x, names: f(entries, kind, x, () if kind == "sinks" else names), "full"),
    _sequence("the gradient of a bias of keys is of a part of the queries", attention_sharding._added,
              lambda f, entries, kind, x, names: f(entries, kind, x, () if kind == "bias" else names), "bias of keys"),
    _sequence("gradients stay in the order of sorted keys", sequence.LocalCall.in_order, lambda f, part, kind, x: x,
              "zigzag"),
    _sequence("values are not sorted with the keys", sequence._taken,
              lambda f, kind, x, order: x if kind == "value" else f(kind, x, order), "zigzag"),
    _sequence("keys past the length are sorted among others", sequence._places,
              lambda f, arrays: f({name: x for name, x in arrays.items() if name != "key_lengths"}), "shuffled"),
    _sequence("a run of keys that is in part past the length is taken for a whole one", sequence._places,
              lambda f, arrays: f({name: x + 3 if name == "key_lengths" else x for name, x in arrays.items()}),
              "shuffled"),
    _sequence("the positions of another device's queries", jax.lax.axis_index, lambda f, names: (f(names) + 1) % 4,
              "causal"),
    _ring("blocks are not passed on", jax.lax.ppermute, lambda f, x, *a: x, "causal"),
    _ring("a block is passed on to the wrong side", jax.lax.ppermute,
          lambda f, x, axes, pairs: f(x, axes, [pair[::-1] for pair in pairs]), "ends"),
    _ring("sums of gradients stay where the block was", sequence._Gradients.travelled, lambda f, self, sums: sums,
          "causal"),
    _ring("a block's outputs take the place of those before", sequence.combine, lambda f, a, b: b, "causal"),
    _ring("the first key of a block is one further", sequence.of_indices,
          lambda f, arrays, rules, at, n: f(arrays, rules, (at[0], at[1] + 1), n), "window"),
    _ring("the gradient of a bias is of the last block", sequence._Gradients.added, _bias_of_last_block,
          "bias of queries"),
    _ring("each group of heads gets the keys of the first", sequence._heads_of,
          lambda f, n, i, kind, x: f(n, 0 if kind == "key" else i, kind, x), "window"),
    _ring("each group of heads gets the sinks of the first", sequence._heads_of,
          lambda f, n, i, kind, x: f(n, 0 if kind == "sinks" else i, kind, x), "window"),
    _ring("the results of a group of heads take the place of the first's", jax.lax.dynamic_update_slice_in_dim,
          lambda f, x, new, at, axis: f(x, new, 0, axis), "zigzag"),
)  # fmt: skip

TABLES = (
    Table("Top-k, by `top_k_oracle.check`", TOP_K_FAULTS, check_top_k, match=r"indices|ulp"),
    Table("Any cotangent of the loss, by the check named", LOSS_FAULTS, check_loss),
    Table("The loss of a product, by the check named", LINEAR_FAULTS, check_loss),
    Table("Rows sharded along columns, by `test_columns.check`", COLUMNS_FAULTS, check_columns),
    Table("Attention over a sharded sequence, by `test_sequence.check_sharded`", SEQUENCE_FAULTS, check_sequence),
)
ON_STAND_INS = TABLES[-2:]
