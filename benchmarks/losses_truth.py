"""The truth about cross entropy and top-k softmax, for `truth`: float64 for some rows, float32 for all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case
from benchmarks.oracle import oracle
from pallas_kernels.monoid import Stats, log_normalizer
from pallas_kernels.softmax import reference
from pallas_kernels.softmax.problem import IGNORED

_CHECKED_ELEMENTS = 1 << 28  # at once, in float32
_LOSS_ULPS = 64.0


def truths(case: Case, operands: list[np.ndarray], rows: int) -> list[tuple[np.ndarray, np.ndarray | None]]:
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


def every_row(case: Case, ulps: float) -> Any:
    """A function of (operands, outputs): the largest deviation from float32, `ulps` of a gradient being tolerated."""
    row = _top_k_row(case, ulps) if case.op == "top_k" else _loss_row(case, ulps)

    def check(operands: tuple[jax.Array, ...], got: Any) -> jax.Array:
        leaves = jax.tree.leaves(got)
        batch = max(1, _CHECKED_ELEMENTS // case.cols)
        rows = (*operands, *(leaf for leaf in leaves if leaf.ndim))
        off, losses = jax.lax.map(lambda leaves: row(*leaves), rows, batch_size=batch)
        values = [_off(leaf, losses.mean(), jnp.abs(losses).mean(), _LOSS_ULPS) for leaf in leaves if not leaf.ndim]
        return jnp.stack([off.max(), *values]).max()

    return check


def _row(case: Case) -> dict[str, Any]:
    """The options as the kernels' layer names them."""
    names = {"label_smoothing": ("smoothing", 0.0), "z_loss": ("z_loss", 0.0), "logits_soft_cap": ("soft_cap", None)}
    return {name: case.options.get(option, default) for option, (name, default) in names.items()}


def _loss_row(case: Case, ulps: float) -> Any:
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


def _top_k_row(case: Case, ulps: float) -> Any:
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
