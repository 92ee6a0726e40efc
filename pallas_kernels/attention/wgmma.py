"""WGMMA on panels of shared memory: issue, wait, and the panels themselves.

Mosaic's own WGMMA always accumulates, so that registers must be cleared before: 32 of the 466 instructions that a tile
of keys takes with heads of 64. These can also overwrite. Mosaic's own does not read panels either.
Source: PTX ISA, "wgmma", matrix descriptors and strides.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.config import WARPGROUP_ROWS
from pallas_kernels.attention.online_softmax import WGMMA
from pallas_kernels.attention.problem import Attention
from pallas_kernels.mosaic import ptx

_DEPTH = 16  # columns of 16-bit numbers that an instruction multiplies
_LINE = 128  # bytes of a panel's row
_EIGHT_LINES = 8 * _LINE  # over which the swizzle repeats
_SWIZZLE = 1  # how a descriptor names the swizzle of a line


def multiply(left: Any, right: Any, *, depth: int, sums: jax.Array | None = None) -> jax.Array:
    """Issues `left @ right.T` of `depth` columns in panels of shared memory; with `sums`, adds to those.

    Without `sums`, WGMMA overwrites the registers. The result is for `wait` alone.
    """
    dtype, (_, rows, _), (_, numbers, _) = jnp.dtype(right.dtype), left.shape, right.shape

    def multiply_shared(ctx, left, right, *sums):
        pairs = []
        for column in range(0, depth, _DEPTH):
            panel, within = divmod(column, PANEL)
            offset = within * dtype.itemsize
            places = [(x, panel * n * _LINE + offset) for x, n in ((left, rows), (right, numbers))]
            pairs.append(tuple([_panel_descriptor(*place)] for place in places))
        return _issue(pairs, numbers, dtype, *sums)

    return _call(multiply_shared, (left, right), numbers, sums)


def multiply_rows(sums: jax.Array, left: jax.Array, right: Any) -> jax.Array:
    """Issues `sums + left @ right`, the right factor in panels of shared memory. The result is for `wait`."""
    dtype, numbers, rows = jnp.dtype(right.dtype), sums.shape[1], right.shape[1]

    def multiply_registers(ctx, left, right, *sums):
        words = [ptx.pair_word(pair) for pair in left.registers.flat]
        pairs = []
        for i in range(rows // _DEPTH):
            descriptor = _panel_descriptor(right, i * _DEPTH * _LINE, rows * _LINE)
            pairs.append((words[4 * i : 4 * i + 4], [descriptor]))
        return _issue(pairs, numbers, dtype, *sums, transposed=(False, True))

    return _call(multiply_registers, (left, right), numbers, sums)


def multiply_columns(left: Sequence[Any], right: Sequence[Any]) -> jax.Array:
    """Issues the sum of `x.T @ y`: each `x` a panel, each `y` panels of as many rows. The result is for `wait`."""
    dtype, (panels, rows, columns) = jnp.dtype(right[0].dtype), right[0].shape

    def multiply_transposed(ctx, *refs):
        pairs = []
        for x, y in zip(refs[: len(left)], refs[len(left) :], strict=True):
            for offset in range(0, rows * _LINE, _DEPTH * _LINE):
                pairs.append(([_panel_descriptor(x, offset)], [_panel_descriptor(y, offset, rows * _LINE)]))
        return _issue(pairs, panels * columns, dtype, transposed=(True, True))

    return _call(multiply_transposed, (*left, *right), panels * columns, None)


def _call(operation: Any, factors: tuple[Any, ...], numbers: int, sums: jax.Array | None) -> jax.Array:
    kinds = [WGMMA if isinstance(x, jax.Array) else plgpu.RefType() for x in factors]
    totals = () if sums is None else (sums,)
    result = plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, numbers), jnp.dtype(jnp.float32), layout=WGMMA)
    return plgpu.inline_mgpu(arg_types=(*kinds, *[WGMMA] * len(totals)), return_type=result)(operation)(
        *factors, *totals
    )


def _issue(
    pairs: Sequence[tuple[list[ir.Value], list[ir.Value]]],
    numbers: int,
    dtype: jnp.dtype,
    sums: mgpu.FragmentedArray | None = None,
    *,
    transposed: tuple[bool, bool] = (False, False),
) -> mgpu.FragmentedArray:
    """A group of WGMMA of pairs of factors: a descriptor, or four registers on the left, and a descriptor.

    `transposed`: whether the left factor has its rows, and the right one its columns, along the lines of panels.
    """
    count, kind = numbers // 2, {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
    given = [] if sums is None else [x for pair in sums.registers.flat for x in ptx.elements(pair)]
    in_registers = len(pairs[0][0]) > 1
    immediates = ", ".join(["1", "1", *(str(int(x)) for x in transposed[in_registers:])])
    numbered = itertools.count(count + len(given))
    into = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    text = "{ .reg .pred p; wgmma.fence.sync.aligned;"
    for i, (left, _) in enumerate(pairs):
        factor = ",".join(f"${next(numbered)}" for _ in left)
        text += (
            f" setp.ne.b32 p, {int(i > 0 or sums is not None)}, 0; wgmma.mma_async.sync.aligned.m{WARPGROUP_ROWS}"
            f"n{numbers}k{_DEPTH}.f32.{kind}.{kind} {into}, {'{' + factor + '}' if in_registers else factor}, "
            f"${next(numbered)}, p, {immediates};"
        )
    text += " wgmma.commit_group.sync.aligned; }"
    operands = [x for pair in pairs for factor in pair for x in factor]
    constraints = ["=f"] * count + [str(i) for i in range(len(given))]
    constraints += [kind for left, _ in pairs for kind in (*["r" if in_registers else "l"] * len(left), "l")]
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    results = llvm.inline_asm(struct, [*given, *operands], text, ",".join(constraints), has_side_effects=True)
    return _array([llvm.extractvalue(ir.F32Type.get(), results, [i]) for i in range(count)], numbers)


def _array(values: list[ir.Value], numbers: int) -> mgpu.FragmentedArray:
    registers = np.empty(WGMMA.to_mgpu().registers_shape((WARPGROUP_ROWS, numbers)), dtype=object)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    registers.flat[:] = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, len(values), 2)]
    return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)


def _panel_descriptor(ref: ir.Value, offset: int, between_panels: int = 0) -> ir.Value:
    """The matrix descriptor of panels from byte `offset` on; `between_panels`: their stride where there are several."""
    place = arith.andi(arith.shrui(ptx.shared_address(ref), ptx.c32(4)), ptx.c32(0x3FFF))
    layout = between_panels >> 4 << 16 | _EIGHT_LINES >> 4 << 32 | _SWIZZLE << 62
    layout = ptx.c64(layout - (1 << 64) if layout >= 1 << 63 else layout)
    # Added elsewhere, the offset has the same value, but ptxas keeps the descriptor in registers of each thread.
    if between_panels:
        return arith.addi(arith.ori(arith.extui(ptx.i64(), place), layout), ptx.c64(offset >> 4))
    return arith.ori(arith.extui(ptx.i64(), arith.addi(place, ptx.c32(offset >> 4))), layout)


def wait(issued: Any, *, pending: int) -> jax.Array:
    """Waits for a product; `pending` products that were issued after it may still be under way."""
    plgpu.wgmma_wait(pending)
    return completed(issued)


def completed(issued: jax.Array) -> jax.Array:
    """A product that an earlier wait has completed."""
    return lax.optimization_barrier(issued)


def pin_wait_after(x: jax.Array) -> None:
    """Keeps ptxas from moving the next wait above the computation of `x`, whose numbers are below 2^127.

    ptxas hoists `wait_group` above the exponentials that should overlap with the product, but never over `nanosleep`.
    A `nanosleep` that is predicated off depends on the last number of `x`.
    """

    def wait_for_numbers(ctx, x):
        number = ptx.elements(x.registers.flat[-1])[-1]
        ptx.asm("{ .reg .pred p; setp.gt.f32 p, $0, 0f7F000000; @p nanosleep.u32 0; }", "f", [number])

    plgpu.inline_mgpu(arg_types=(WGMMA,))(wait_for_numbers)(x)


def columns_of_tile(size: int, dtype: jnp.dtype) -> int:
    """Columns of the widest swizzled tile, of 128 bytes at most, that divides `size` columns."""
    return next(c for c in (n // dtype.itemsize for n in (128, 64, 32)) if size % c == 0)


def transforms(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """Of shared memory in swizzled tiles of eight rows and `columns` columns."""
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as the tensor cores read it."""
    dtype = jnp.dtype(dtype)
    return plgpu.SMEM(shape, dtype, transforms=transforms(columns_of_tile(shape[-1], dtype), dtype))


PANEL = 64  # columns of a panel, whose rows of 16-bit numbers take a swizzled line of 128 bytes


def panels(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for `[..., rows, columns]`, as `[..., panels, rows, 64]`: TMA fills a panel from any rows.

    Lines are swizzled by TMA and by WGMMA's descriptors, of which Pallas knows nothing. Where an array in global memory
    ends, TMA fills the rest of a panel with zeros.
    """
    *leading, rows, columns = shape
    assert jnp.dtype(dtype).itemsize == 2
    return plgpu.SMEM((*leading, -(-columns // PANEL), rows, PANEL), dtype)


def store(target: Any, value: jax.Array) -> None:
    """Stores registers to global memory in their layout; JAX 0.12 would refuse rows shorter than a sector."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def bias_is_tiled(problem: Attention) -> bool:
    """Whether the bias consists of whole tiles of 8 rows and 128 bytes, none of them repeated: TMA can copy those."""
    if problem.bias is None or problem.bias_dtype is None:
        return False
    return problem.bias[2] % 8 == 0 and problem.bias[3] * problem.bias_dtype.itemsize % 128 == 0
