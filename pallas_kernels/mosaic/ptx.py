"""Helpers to emit inline PTX into a kernel, and to keep the compilers from unrolling and hoisting."""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.types import Index

WARPGROUP = 128
WARPS = 4  # of a warpgroup
Layout = Any  # of registers: a `plgpu.Layout`, or one reduced or made by it, of a type that is not public
SPLAT = plgpu.Layout.WG_SPLAT
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # one number a row
Result = tuple[tuple[int, ...], DTypeLike, Layout]  # an array's shape, dtype and layout
INTEGER: Result = (), jnp.int32, SPLAT  # a result that is the same in a warp
Place = Index | pl.Slice | slice  # along an axis of a reference


def i32() -> ir.Type:
    """Returns a word."""
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    """Returns an address."""
    return ir.IntegerType.get_signless(64)


def c32(x: int) -> ir.Value:
    """Returns a 32-bit constant in the kernel."""
    return utils.c(x, i32())


def c64(x: int) -> ir.Value:
    """Returns a 64-bit constant in the kernel."""
    return utils.c(x, i64())


def thread_in_warpgroup() -> ir.Value:
    """Returns the thread's index in its warpgroup."""
    return rem(utils.thread_idx(), WARPGROUP)


def reread_thread_index() -> ir.Value:
    """Reads the thread's index in its warpgroup anew, so that no loop keeps it in a register."""
    return rem(asm_value("mov.u32 $0, %tid.x;", "=r", []), WARPGROUP)


def opaque_word(x: ir.Value) -> ir.Value:
    """Returns a word that the compiler cannot hoist, so that what is derived from it stays in the loop."""
    return asm_value("mov.b32 $0, $1;", "=r,r", [x])


def uniform(x: ir.Value) -> ir.Value:
    """Puts a word that all lanes share into a uniform register, where the compiler cannot prove that they do."""
    return asm_value("redux.sync.or.b32 $0, $1, -1;", "=r,r", [x])


def _with_constants(operation: Callable[..., ir.Value]) -> Callable[[ir.Value, ir.Value | int], ir.Value]:
    """Makes an operation on two integers take a constant as the second, too."""
    return lambda x, y: operation(x, y if isinstance(y, ir.Value) else utils.c(y, x.type))


# Arithmetic of unsigned integers.
add, sub, mul = map(_with_constants, (arith.addi, arith.subi, arith.muli))
div, rem, bit_and = map(_with_constants, (arith.divui, arith.remui, arith.andi))


def compare(kind: str, x: ir.Value, y: ir.Value | int) -> ir.Value:
    """Compares integers by a predicate of `arith.CmpIPredicate`; the second may be a constant."""
    return _with_constants(functools.partial(arith.cmpi, getattr(arith.CmpIPredicate, kind)))(x, y)


def scalar(x: mgpu.FragmentedArray) -> ir.Value:
    """Returns the value of an array that is the same in every thread."""
    return x.registers.item()


def integer(x: ir.Value) -> mgpu.FragmentedArray:
    """Converts back, an int32 to an `INTEGER`."""
    return mgpu.FragmentedArray.splat(x, (), is_signed=True)


def row_value(x: mgpu.FragmentedArray) -> ir.Value:
    """Returns the thread's value in an array that has one value for each of its tile's rows."""
    value = x.registers.flat[0]
    return elements(value)[0] if isinstance(value.type, ir.VectorType) else value


def word(x: mgpu.FragmentedArray) -> ir.Value:
    """Gives `row_value` as a word."""
    return arith.bitcast(i32(), row_value(x))


def elements(v: ir.Value) -> list[ir.Value]:
    """Lists the elements of an MLIR vector."""
    n = ir.VectorType(v.type).shape[0]
    return [vector.extract(v, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])) for i in range(n)]


def pair_word(pair: ir.Value, bits: int = 32) -> ir.Value:
    """Packs two numbers of a vector as one of `bits` bits."""
    packed = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(bits)), pair)
    return vector.extract(packed, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


def global_address(ref: ir.Value) -> ir.Value:
    """Returns the address of an array in global memory."""
    return llvm.ptrtoint(i64(), utils.memref_ptr(ref))


def word_address(words: ir.Value, index: ir.Value) -> ir.Value:
    """Returns the address of a word of an array in global memory."""
    wide = arith.extui(i64(), index)
    return add(global_address(words), mul(wide, 4))


def shared_address(ref: ir.Value) -> ir.Value:
    """Returns the address of an array in the CTA's shared memory."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


KINDS = {16: "h", 32: "r", 64: "l"}  # of a register of so many bits, as a constraint of assembly names it


def load_if(address: ir.Value, predicate: ir.Value | None, bits: int, fill: int = 0) -> ir.Value:
    """Loads 8 to 64 bits from global memory where the predicate holds (None: always), else gives `fill`.

    A byte becomes 16 bits.
    """
    width, load = max(bits, 16), f"ld.global.{'u8' if bits == 8 else f'b{bits}'} $0, [$1];"
    word_type, constraints = ir.IntegerType.get_signless(width), f"=&{KINDS[width]},l"
    if predicate is None:
        return asm_value(load, constraints, [address], word_type)
    return asm_value(f"mov.b{width} $0, {fill}; @$2 {load}", constraints + ",b", [address, predicate], word_type)


def asm_value(text: str, constraints: str, operands: list[ir.Value], kind: ir.Type | None = None) -> ir.Value:
    """Emits inline assembly that stays where it is; its result is a word unless its type is given."""
    return llvm.inline_asm(kind or i32(), operands, text, constraints, has_side_effects=True)


def asm(text: str, constraints: str, operands: list[ir.Value]) -> None:
    """Runs inline assembly without a result."""
    asm_value(text, constraints, operands, ir.Type.parse("!llvm.void"))


def inline(
    body: Callable[..., Any],
    *operands: Any,
    result: Result | list[Result] | None = None,
    static: Mapping[str, Any] | None = None,
) -> Any:
    """Emits `body(ctx, *operands)` into the kernel, and returns an array of the shape, dtype and layout of `result`.

    An operand is a reference or a `Part` of one, an integer that is the same in every thread, or a pair of any and its
    type: an array's layout, or a reference's transforms. A list of `result` gives arrays. `static` has what
    else the body's meaning depends on, by the names that its model in the tests' simulated GPU has for it.
    """
    types, arguments = [], []
    for x in operands:
        x, of_x = x if isinstance(x, tuple) else (x, None)
        if isinstance(x, Part):
            (ref, *starts), structure = jax.tree.flatten(x)
            x = jax.tree.unflatten(structure, [ref, *map(int32, starts)])
            of_x = jax.tree.unflatten(structure, [of_x or plgpu.RefType(), *[SPLAT] * len(starts)])
        elif of_x is None and isinstance(x, (int, jax.Array)):
            x, of_x = int32(x), SPLAT
        types.append(plgpu.RefType() if of_x is None else of_x)
        arguments.append(x)

    @functools.wraps(body)
    def of_parts(ctx, *operands):
        return body(ctx, *(x.cut() if isinstance(x, Part) else x for x in operands))

    vars(of_parts)["static"] = static or {}
    struct = lambda of: plgpu.ShapeDtypeStruct(of[0], jnp.dtype(of[1]), layout=of[2])
    returned = [*map(struct, result)] if isinstance(result, list) else None if result is None else struct(result)
    return plgpu.inline_mgpu(arg_types=tuple(types), return_type=returned)(of_parts)(*arguments)


def int32(x: Index) -> Any:
    """Converts an index to an int32."""
    return np.int32(x) if isinstance(x, int) else lax.convert_element_type(x, np.int32)


def cut_by_operations(refs: SimpleNamespace, *names: str) -> None:
    """Makes those references whole `Part`s, where there are such references."""
    for name in names:
        if hasattr(refs, name):
            setattr(refs, name, Part(getattr(refs, name)))


@jax.tree_util.register_pytree_node_class
class Part:
    """A part of a reference, as `ref.at[...]`, which `inline` cuts out within the operation that it is given to.

    Mosaic infers a layout for each slice of shared memory that it knows of, in time that grows with their square.
    """

    def __init__(self, ref: Any, *places: tuple[Place, ...]):
        self.ref, self.places = ref, places

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.ref.shape
        for place in self.places:
            kept = (int(i.size) if isinstance(i, pl.Slice) else 0 for i in place)
            shape = (*(size for size in kept if size), *shape[len(place) :])
        return shape

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.ref.dtype)

    @property
    def at(self) -> "Part":
        return self

    def __getitem__(self, place: Place | tuple[Place, ...]) -> "Part":
        return Part(self.ref, *self.places, place if isinstance(place, tuple) else (place,))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...]]:
        starts, places = [], []
        for place in self.places:
            axes = [(i.start, int(i.size)) if isinstance(i, pl.Slice) else (i, None) for i in place]
            starts += [start for start, _ in axes if not isinstance(start, int)]
            places.append(tuple((start if isinstance(start, int) else None, size) for start, size in axes))
        return (self.ref, *starts), tuple(places)

    @classmethod
    def tree_unflatten(cls, static: tuple[tuple[Any, ...], ...], leaves: tuple[Any, ...]) -> "Part":
        ref, *starts = leaves
        following = iter(starts)
        places = []
        for place in static:
            axes = [(next(following) if start is None else start, size) for start, size in place]
            places.append(tuple(start if size is None else pl.Slice(start, size) for start, size in axes))
        return cls(ref, *places)

    def cut(self) -> ir.Value:
        """Emits the slice."""
        index = lambda i: i if isinstance(i, int) else arith.index_cast(ir.IndexType.get(), scalar(i))
        ref = self.ref
        for place in self.places:
            cut = (mgpu.ds(index(i.start), int(i.size)) if isinstance(i, pl.Slice) else index(i) for i in place)
            ref = utils.memref_slice(ref, tuple(cut))
        return ref


Ref = jax.Ref | Part


def where(condition: Any, x: jax.Array | float, y: jax.Array | float) -> jax.Array:
    """Selects as `jnp.where`, arrays of the condition's shape and numbers, without a `jit`: tracing takes a third."""
    of_numbers = jnp.result_type(*(np.int32 if isinstance(v, int) else np.float32 for v in (x, y)))
    dtype = next((v.dtype for v in (x, y) if isinstance(v, jax.Array)), of_numbers)
    number = lambda v: lax.full(condition.shape, v, dtype) if condition.shape else dtype.type(v)
    return lax.select(condition, *(v if isinstance(v, jax.Array) else number(v) for v in (x, y)))


def no_unroll[Carry](start: Index, stop: int, body: Callable[[jax.Array, Carry], Carry], init: Carry) -> Carry:
    """Works as `lax.fori_loop`, and stays a loop.

    Unrolled, a slice of float32 logits and tangents takes 137 registers instead of 56, and an SM holds one CTA instead
    of two.
    """

    def keep_loop(ctx):
        asm('.pragma "nounroll";', "", [])

    def step(i: jax.Array, carry: Carry) -> Carry:
        inline(keep_loop)
        return body(i, carry)

    return lax.fori_loop(start, opaque(jnp.int32(stop)), step, init)


def opaque(x: jax.Array) -> jax.Array:
    """Returns `x` in a form that the compiler cannot hoist: what a loop derives from it stays in the loop.

    Otherwise the attention kernels keep 24 matrix descriptors in registers all along the loop, which spills.
    """

    def copy_scalar(ctx, x):
        return integer(opaque_word(scalar(x)))

    return inline(copy_scalar, x, result=INTEGER)
