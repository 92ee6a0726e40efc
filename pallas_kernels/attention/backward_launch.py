"""What the backward kernels share outside of them: the call, from operands to gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import places
from pallas_kernels.attention import backward_operands, backward_tiles, drawn
from pallas_kernels.attention.configs import AnyBackwardConfig, BackwardConfig
from pallas_kernels.attention.problem import Attention

Body = Callable[..., None]


def launch(
    name: str,
    problem: Attention,
    config: AnyBackwardConfig,
    scratch: dict[str, Any],
    body: Body,
    operands: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Runs `body(problem, config, each_block)` with XLA's share before and after it."""
    ops = backward_operands.named(problem, operands)
    nothing = backward_operands.without_keys(problem, ops)
    delta = backward_operands.logit_shift(ops, nothing)
    inputs = backward_operands.inputs(problem, config, ops, nothing, delta)
    outputs, begun = backward_operands.outputs(problem, config, inputs)
    tiles, blocks = backward_tiles.launched(problem, config)
    begun |= backward_tiles.begun(config, blocks)
    names = [*inputs, *begun, *outputs, *scratch]

    def kernel(*refs: jax.Ref) -> None:
        by_name = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        if isinstance(config, BackwardConfig):
            return body(problem, config, by_name, tiles, blocks)
        body(problem, config, backward_tiles.each_block(problem, config, by_name, tiles, blocks))

    call = plgpu.kernel(
        kernel,
        out_type=list(outputs.values()),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=list(scratch.values()),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )

    def run(begun: list[jax.Array], *inputs: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        return places.call(call, inputs, begun, list(outputs.values()))

    arrays = list(begun.values()), *inputs.values()
    results, left = drawn.call(run, *arrays) if config.tiles == "drawn" else run(*arrays)
    written = dict(zip(outputs, results, strict=True)) | dict(zip(begun, left, strict=True))
    gradients = backward_operands.gradients(problem, config, written)
    if problem.bias_gradient:
        gradients.append(backward_operands.bias_gradient(problem, ops, written["d_logits"]))
    if problem.sinks:
        gradients.append(backward_operands.sinks_gradient(ops, nothing, delta))
    return tuple(gradients)
