"""Decides whether the kernel multiplies, and with which config, by a model of waves of tiles.

The figures were fitted to the calls of `benchmarks/results/h200/sample_*.json`.
"""

import dataclasses

from pallas_kernels.decision import Decision, Kernel, decision, refusals
from pallas_kernels.hardware import Device
from pallas_kernels.linear_cross_entropy import forward
from pallas_kernels.linear_cross_entropy.forward import Config, Problem

_TILE_US = 0.0115  # of the kernel, for each column of the embedding
_FLOPS_PER_US = 5.5e8  # of XLA's product
_LOGITS_BYTES_PER_US, _LOGITS_PASSES = 3.5e6, 3  # XLA writes float32 logits, and reads them twice
_WEIGHT_BYTES_PER_US = 4.2e6
_LAUNCHES_US = 4  # of XLA's kernels beyond the product
_FAVOURED = 0.9  # of the largest group's time: fewer tiles to a group have more states to merge


def config(problem: Problem, device: Device) -> Config:
    """Chooses the largest group of tiles of columns, or a smaller one that leaves fewer SMs idle."""
    largest = Config()
    smaller = [dataclasses.replace(largest, group=n) for n in (largest.group // 2, 1)]
    best = min(smaller, key=lambda config: _tiles_in_turn(problem, config, device))
    limit = _FAVOURED * _tiles_in_turn(problem, largest, device)
    return best if _tiles_in_turn(problem, best, device) <= limit else largest


def left_to_xla(problem: Problem, device: Device) -> str | None:
    """Says why XLA computes the loss from all logits faster; None where the kernel is faster."""
    best = config(problem, device)
    reads = problem.embedding * problem.vocabulary * problem.dtype.itemsize / _WEIGHT_BYTES_PER_US
    ours = max(_tiles_in_turn(problem, best, device) * problem.embedding * _TILE_US, reads)
    logits = problem.tokens * problem.vocabulary
    product = max(2 * logits * problem.embedding / _FLOPS_PER_US, reads)
    if ours <= product + 4 * logits * _LOGITS_PASSES / _LOGITS_BYTES_PER_US + _LAUNCHES_US:
        return None
    tiles = -(-problem.tokens // best.tokens) * -(-problem.vocabulary // best.columns)
    return f"{tiles} tiles of logits keep few of {device.sm_count} SMs busy, and XLA's tiles are smaller"


def _tiles_in_turn(problem: Problem, config: Config, device: Device) -> int:
    """Says how many tiles one CTA computes, one after another."""
    groups = -(-problem.tokens // config.tokens) * -(-problem.vocabulary // (config.group * config.columns))
    return -(-groups // device.sm_count) * config.group


def _configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    return (config(problem, device),)


_KERNEL = Kernel("linear_cross_entropy", forward.unsupported, _configs, forward.launch)
KERNELS = {_KERNEL.name: _KERNEL}


def decide(problem: Problem, device: Device, *, refused: str | None = None, named: bool = False) -> Decision:
    """Decides whether the kernel computes a problem; `refused` says why the call is not one that it computes.

    If the kernel is `named`, the user asked for it, even where XLA is faster.
    """
    why_not = refused or refusals(KERNELS, problem, device)[_KERNEL.name]
    why_not = why_not or (None if named else left_to_xla(problem, device))
    return decision(
        problem,
        device,
        _KERNEL if why_not is None else None,
        () if why_not is None else ((_KERNEL.name, why_not),),
        None,
        reason="product and online softmax are one kernel",
        invariant=None,
    )
