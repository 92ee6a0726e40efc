"""The truth about the cross entropy's kernels, `[rows, cols]` in float64: what a row's loss is made of, its gradient.

Rows whose label is -1 are as if they were not there: zeros, and the numbers 0, 1 and 0.
"""

import numpy as np
import oracle

from pallas_kernels.problem import Problem

Array = np.ndarray


def logits(problem: Problem, x: Array, labels: Array, where: Array | None) -> Array:
    """`scale * x` softly capped, -inf where masked; 0 in rows that are ignored."""
    z = _capped(problem, np.where(labels[:, None] < 0, 0.0, x.astype(np.float64)) * problem.scale)
    return z if where is None else np.where(where, z, -np.inf)


def lse(problem: Problem, x: Array, labels: Array, where: Array | None) -> tuple[Array, Array]:
    """The rows' logsumexp, and the size that its error is measured against."""
    z = logits(problem, x, labels, where)
    m, s = oracle.stats(z)
    with np.errstate(divide="ignore"):
        size = np.abs(m) + np.abs(np.log(s)) + 1
    # In 16 bits a capped logit is the cap less something.
    size = size + (problem.soft_cap or 0) * (problem.dtype.itemsize == 2)
    ignored = labels < 0
    return np.where(ignored, 0.0, oracle.logsumexp(z, -1)), np.where(ignored, 1.0, size)


def total(problem: Problem, x: Array, labels: Array, where: Array | None) -> tuple[Array, Array]:
    """The sum of the rows' logits, and the size of its error."""
    assert where is None
    z = np.where(labels[:, None] < 0, 0.0, logits(problem, x, labels, where))
    if problem.soft_cap is None:
        return z.sum(1), np.abs(z).sum(1)
    # A capped logit errs by three ulp; in 16 bits it is the cap less something.
    return z.sum(1), 3 * np.abs(z).sum(1) + z.shape[1] * problem.soft_cap * (problem.dtype.itemsize == 2)


def gradient(problem: Problem, x: Array, labels: Array, weights: Array, where: Array | None) -> tuple[Array, Array]:
    """The gradient of `weights` times the loss, and the size of the terms it is the difference of."""
    z = logits(problem, x, labels, where)
    p = oracle.softmax(z, where=where)
    normalizer = oracle.logsumexp(z, -1)[:, None]
    weights = np.where(labels < 0, 0.0, weights)[:, None] * problem.scale
    hit = (np.arange(x.shape[1]) == labels[:, None]) * (1 - problem.smoothing)
    mass = problem.smoothing / x.shape[1]
    with np.errstate(invalid="ignore"):
        tilt = 2 * problem.z_loss * normalizer if problem.z_loss else np.zeros_like(normalizer)
        part, part_terms = p * (1 + tilt), p * (1 + np.abs(tilt))
        if where is not None:
            part, part_terms = np.where(where, part, 0), np.where(where, part_terms, 0)
        out, terms = weights * (part - hit - mass), np.abs(weights) * (part_terms + hit + mass)
        if where is not None:
            out = np.where(where | (hit > 0), out, 0)
        if problem.soft_cap is not None:
            u = np.where(labels[:, None] < 0, 0.0, x.astype(np.float64)) * (problem.scale / problem.soft_cap)
            out = out / np.cosh(np.clip(u, -300, 300)) ** 2
    ignored = labels[:, None] < 0
    return np.where(ignored, 0.0, out), np.where(ignored, 0.0, terms)


def _capped(problem: Problem, z: Array) -> Array:
    return z if problem.soft_cap is None else problem.soft_cap * np.tanh(z / problem.soft_cap)
