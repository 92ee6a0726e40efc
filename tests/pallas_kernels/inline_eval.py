"""What stands inside `ptx.inline`, on a CPU: its MLIR and PTX evaluated by NumPy for the 128 threads of a warpgroup.

`Inline` takes the place of `ptx.inline`: it emits a body's operations, evaluates them, has the body's model of `models`
compute the same, and compares results and memory. A value is an array with one row a thread: integers as uint64 of
which the type's bits count, vectors with a second axis. An access outside of every array is an error.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import models
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_kernels.mosaic import ptx

ROUNDED = {"multiply_subtract": 2.0**-22}  # bodies whose model rounds more often, and what that is for numbers near 1
THREADS = np.arange(128, dtype=np.uint64)
Value = np.ndarray


class Ref:
    """An array in memory, as kernels see it."""

    def __init__(self, data: np.ndarray, copy: bool = True):
        self.data = np.array(data, copy=copy)

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    at = property(lambda self: _Rows(self.data))


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What `pl.ds` names of an array, in the same memory."""

    data: np.ndarray

    def __getitem__(self, rows: Any) -> Ref:
        return Ref(self.data[int(rows.start) : int(rows.start) + rows.size], copy=False)


class Memory:
    """All arrays in one space of addresses, with gaps between them."""

    def __init__(self, refs: list[Ref]):
        self._regions, at = [], 4096
        for ref in refs:
            self._regions.append((at, ref.data.reshape(-1).view(np.uint8)))
            at += (ref.data.nbytes // 4096 + 2) * 4096
        self.starts = [start for start, _ in self._regions]

    def _at(self, address: int, size: int) -> np.ndarray:
        assert address % size == 0, f"{size} bytes at an address that is not a multiple of them"
        for start, held in self._regions:
            if start <= address and address + size <= start + held.size:
                return held[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address} are outside of every array")

    def load(self, address: Value, size: int, active: Value) -> Value:
        found = np.zeros(len(THREADS), np.uint64)
        for i in np.flatnonzero(active):
            found[i] = int.from_bytes(self._at(int(address[i]), size).tobytes(), "little")
        return found

    def store(self, address: Value, size: int, value: Value, active: Value) -> None:
        for i in np.flatnonzero(active):
            number = int(value[i]) & ((1 << 8 * size) - 1)
            self._at(int(address[i]), size)[:] = np.frombuffer(number.to_bytes(size, "little"), np.uint8)


class Machine:
    """What models need of a simulated GPU, of arrays alone."""

    warpgroup = 0

    def load(self, ref: Ref) -> np.ndarray:
        return ref.data

    def store(self, ref: Ref, value: Any) -> None:
        ref.data[...] = np.asarray(value)

    def gather(self, ref: Ref, index: Any, inside: Any, fill: Any) -> np.ndarray:
        *index, inside = np.broadcast_arrays(*map(np.asarray, index), np.asarray(inside))
        found = np.full(inside.shape, fill, ref.dtype)
        found[inside] = ref.data[tuple(i[inside] for i in index)]
        return found

    def scatter(self, ref: Ref, index: Any, inside: Any, value: Any) -> None:
        *index, inside = np.broadcast_arrays(*map(np.asarray, index), np.asarray(inside))
        value = np.broadcast_to(np.asarray(value), inside.shape).astype(ref.dtype)
        ref.data[tuple(i[inside] for i in index)] = value[inside]

    def copy_pages(self, source: Ref, tables: Ref, at: Any, to: Ref, full: Ref, *, pages_first: bool) -> None:
        """Rows behind the table are of the last page's, as `pipeline.copy_pages` says."""
        (batch, row, head), (panels, rows, columns) = map(int, at), to.shape
        pages = source.data if pages_first else source.data.transpose(1, 2, 0, 3)
        size = pages.shape[1]
        for line in range(rows):
            entry = min((row + line) // size, tables.shape[1] - 1)
            own = pages[tables.data[batch, entry], (row + line) % size, head]
            to.data[:, line] = own[: panels * columns].reshape(panels, columns)

    def commit_smem(self) -> None:
        pass


def places(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Which element of an array each thread has in each register, `[registers, 128, vector]`."""
    tiled = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for tile in layout.tiling.tiles:
        k = len(tile)
        lead, last = tiled.shape[:-k], tiled.shape[-k:]
        split = [n for size, t in zip(last, tile, strict=True) for n in (size // t, t)]
        order = [
            *range(len(lead)),
            *range(len(lead), len(lead) + 2 * k, 2),
            *range(len(lead) + 1, len(lead) + 2 * k, 2),
        ]
        tiled = tiled.reshape(*lead, *split).transpose(order)
    rank = tiled.ndim
    axes = [*layout.warp_dims, *layout.lane_dims]
    mine = [d % rank for d in axes if isinstance(d, int)]
    rest = [d for d in range(rank) if d not in (*mine, layout.vector_dim % rank)]
    found = tiled.transpose(*rest, *mine, layout.vector_dim % rank)
    for i, d in enumerate(axes):
        if not isinstance(d, int):
            found = np.repeat(np.expand_dims(found, len(rest) + i), d.times, len(rest) + i)
    return found.reshape(-1, len(THREADS), tiled.shape[layout.vector_dim % rank])


def _bits(kind: ir.Type) -> int:
    return 64 if isinstance(kind, ir.IndexType) else kind.width


def _masked(x: Any, bits: int) -> Value:
    return x if bits == 64 else x & np.uint64((1 << bits) - 1)


def _signed(x: Value, bits: int) -> Value:
    shift = np.uint64(64 - bits)
    return (x << shift).view(np.int64) >> np.int64(64 - bits)


def _dtype(kind: ir.Type) -> np.dtype:
    """That of a float's values, or of an integer in memory."""
    import ml_dtypes

    known = {ir.F32Type: np.float32, ir.F16Type: np.float16, ir.BF16Type: ml_dtypes.bfloat16}
    return np.dtype(next((d for t, d in known.items() if isinstance(kind, t)), None) or f"uint{_bits(kind)}")


def _element(dtype: np.dtype) -> ir.Type:
    of = {"float32": ir.F32Type, "float16": ir.F16Type, "bfloat16": ir.BF16Type}
    return of[dtype.name].get() if dtype.name in of else ir.IntegerType.get_signless(8 * dtype.itemsize)


def _split(kind: ir.Type) -> ir.Type:
    return ir.VectorType(kind).element_type if isinstance(kind, ir.VectorType) else kind


def _cast(x: Value, kind: ir.Type, to: ir.Type) -> Value:
    """A value's bits as another type's, of vectors too."""
    as_bytes = x if not isinstance(_split(kind), (ir.IntegerType, ir.IndexType)) else x.astype(_dtype(_split(kind)))
    found = np.ascontiguousarray(as_bytes).reshape(len(THREADS), -1).view(_dtype(_split(to)))
    found = found.astype(np.uint64) if isinstance(_split(to), (ir.IntegerType, ir.IndexType)) else found
    return found if isinstance(to, ir.VectorType) else found[:, 0]


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_CMPI = ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"]


class _Block:
    """The operations of a body, evaluated in order; one without a rule here is an error where its result is used."""

    def __init__(self, memory: Memory):
        self.memory, self.values = memory, {}

    def run(self, block: Any) -> None:
        for op in block.operations:
            op = op.operation
            rule = getattr(self, "_" + op.name.replace(".", "_"), None)
            if rule is not None:
                found = rule(op, *map(self.get, op.operands))
                for result, value in zip(op.results, [found], strict=False):
                    self.values[result] = value

    def get(self, value: Any) -> Any:
        return self.values.get(value)

    def _arith_constant(self, op: Any) -> Value:
        kind, attribute = op.results[0].type, op.attributes["value"]
        if isinstance(kind, (ir.IntegerType, ir.IndexType)):
            number = int(attribute.value) if not isinstance(attribute, ir.BoolAttr) else int(attribute)
            return np.full(len(THREADS), number & ((1 << _bits(kind)) - 1), np.uint64)
        if isinstance(kind, ir.VectorType):
            attribute = attribute.get_splat_value()
            return np.full((len(THREADS), kind.shape[0]), attribute.value, _dtype(kind.element_type))
        return np.full(len(THREADS), attribute.value, _dtype(kind))

    def _integers(operation: Callable[..., Value]) -> Any:
        return lambda self, op, *x: _masked(operation(*x), _bits(op.results[0].type))

    _arith_addi = _llvm_add = _integers(np.add)
    _arith_subi = _integers(np.subtract)
    _arith_muli = _llvm_mul = _integers(np.multiply)
    _arith_divui = _integers(np.floor_divide)
    _arith_remui = _integers(np.remainder)
    _arith_andi = _integers(np.bitwise_and)
    _arith_ori = _integers(np.bitwise_or)
    _arith_xori = _integers(np.bitwise_xor)
    _arith_minui = _integers(np.minimum)
    _arith_shrui = _integers(np.right_shift)
    _arith_shli = _integers(np.left_shift)

    def _same(self, op: Any, x: Value) -> Value:
        kind = op.results[0].type
        return _masked(x, _bits(kind)) if isinstance(kind, (ir.IntegerType, ir.IndexType)) else x

    _arith_extui = _arith_trunci = _llvm_ptrtoint = _llvm_inttoptr = _arith_index_castui = _same

    def _arith_index_cast(self, op: Any, x: Value) -> Value:
        return _masked(_signed(x, _bits(op.operands[0].type)).view(np.uint64), _bits(op.results[0].type))

    def _arith_cmpi(self, op: Any, x: Value, y: Value) -> Value:
        kind = _CMPI[op.attributes["predicate"].value]
        if kind[0] == "s":
            x, y = (_signed(v, _bits(op.operands[0].type)) for v in (x, y))
        return COMPARE[kind[-2:]](x, y).astype(np.uint64)

    def _arith_cmpf(self, op: Any, x: Value, y: Value) -> Value:
        assert op.attributes["predicate"].value == 9, "only `ugt` is used"
        return (~(x <= y)).astype(np.uint64)

    def _arith_select(self, op: Any, condition: Value, x: Value, y: Value) -> Value:
        return np.where(condition != 0, x, y)

    def _arith_bitcast(self, op: Any, x: Value) -> Value:
        return _cast(x, op.operands[0].type, op.results[0].type)

    _vector_bitcast = _arith_bitcast
    _arith_extf = lambda self, op, x: x.astype(_dtype(_split(op.results[0].type)))
    _arith_mulf = lambda self, op, x, y: x * y
    _arith_negf = lambda self, op, x: -x
    _arith_maximumf = lambda self, op, x, y: np.maximum(x, y)
    _llvm_intr_fma = lambda self, op, x, y, z: (x.astype(np.float64) * y + z).astype(x.dtype)
    _llvm_intr_ctpop = lambda self, op, x: np.bitwise_count(x).astype(np.uint64)
    _vector_from_elements = lambda self, op, *x: np.stack(x, 1)
    _vector_extract = lambda self, op, x, *_: x[:, op.attributes["static_position"][0]]

    def _vector_broadcast(self, op: Any, x: Value) -> Value:
        return np.repeat(x.reshape(len(THREADS), -1), op.results[0].type.shape[0], 1)

    def _gpu_thread_id(self, op: Any) -> Value:
        return THREADS if "<x>" in str(op.attributes["dimension"]) else 0 * THREADS

    def _gpu_block_dim(self, op: Any) -> Value:
        return np.full(len(THREADS), len(THREADS) if "<x>" in str(op.attributes["dimension"]) else 1, np.uint64)

    # A memref is its first byte's address, its offset in elements, and its strides.

    def _memref_subview(self, op: Any, source: Any, *dynamic: Value) -> Any:
        start, offset, strides = source
        left = iter(dynamic)
        for at, stride in zip(op.attributes["static_offsets"], strides, strict=True):
            offset = offset + (next(left) if at < 0 else np.uint64(at)) * np.uint64(stride)
        return start, offset, ir.MemRefType(op.results[0].type).get_strides_and_offset()[0]

    def _builtin_unrealized_conversion_cast(self, op: Any, x: Any) -> Any:
        return x

    def _llvm_extractvalue(self, op: Any, x: Any) -> Value:
        return x[{1: 0, 2: 1}[op.attributes["position"][0]]]

    def _llvm_inline_asm(self, op: Any, *operands: Value) -> Any:
        constraints = op.attributes["constraints"].value
        has_result = constraints.startswith("=")
        asm = _Asm(self.memory, ([None] if has_result else []) + list(operands))
        found = asm.run(op.attributes["asm_string"].value)
        kind = op.results[0].type if len(op.results) else None
        return None if not has_result else _masked(found, _bits(kind))


class _Asm:
    """The few instructions of PTX that bodies have, by threads that may branch apart."""

    def __init__(self, memory: Memory, operands: list[Any]):
        self.memory, lane = memory, THREADS % np.uint64(32)
        self.registers = {f"${i}": x for i, x in enumerate(operands) if x is not None}
        self.registers |= {"%laneid": lane, "%tid.x": THREADS, "%lanemask_lt": (np.uint64(1) << lane) - np.uint64(1)}

    def run(self, text: str) -> Value | None:
        text = re.sub(r"^\s*\{", "", text.strip()).strip()
        text = text[:-1] if text.endswith("}") and text.count("}") > text.count("{") else text
        labels, steps = {}, []
        for line in filter(None, (part.strip() for part in text.split(";"))):
            while label := re.match(r"(\w+):\s*", line):
                labels[label[1]], line = len(steps), line[label.end() :]
            if line and not line.startswith((".reg", ".pragma")):
                steps.append(line)
        at = np.zeros(len(THREADS), int)
        for _ in range(100_000):
            if (here := at.min()) == len(steps):
                return self.registers.get("$0")
            active = at == here
            guard, opcode, rest = re.match(r"(?:@(!?[$\w]+)\s+)?(\S+)\s*(.*)", steps[here], re.DOTALL).groups()
            if guard:
                active &= (self._value(guard.lstrip("!")) != 0) != guard.startswith("!")
            at[at == here] += 1
            if opcode == "bra":
                at[active] = labels[rest.strip()]
            else:
                self._step(opcode.split("."), _operands(rest), active)
        raise AssertionError("a loop without an end")

    def _value(self, name: str) -> Value:
        if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", name) and name not in self.registers:
            return np.full(len(THREADS), int(name, 0) & (2**64 - 1), np.uint64)
        return self.registers[name]

    def _address(self, text: str) -> Value:
        name, _, more = text.strip("[]").partition("+")
        return self._value(name) + np.uint64(int(more or 0))

    def _step(self, opcode: list[str], operands: list[str], active: Value) -> None:
        name, kind = opcode[0], opcode[-1]
        if name in ("bar", "fence"):
            return
        bits = int(re.sub(r"\D", "", kind) or 1)
        if name == "st":
            words = operands[1].strip("{}").split(",")
            for i, word in enumerate(words):
                value = self._value(word.strip())
                self.memory.store(self._address(operands[0]) + np.uint64(i * bits // 8), bits // 8, value, active)
            return
        if name == "ld":
            found = self.memory.load(self._address(operands[1]), bits // 8, active)
        else:
            found = self._computed(opcode, bits, [self._value(x) for x in operands[1:]])
        before = self.registers.get(operands[0], np.zeros(len(THREADS), np.uint64))
        self.registers[operands[0]] = np.where(active, found, before)

    def _computed(self, opcode: list[str], bits: int, x: list[Value]) -> Value:
        name, kind = opcode[0], opcode[-1]
        wide = lambda v: _signed(v, bits) if kind.startswith("s") else _masked(v, bits)
        if name == "mov":
            return _masked(x[0], bits)
        if name == "add":
            return _masked(x[0] + x[1], bits)
        if name == "mad":
            x = [_masked(x[0], bits), _masked(x[1], bits), x[2]]
            return x[0] * x[1] + x[2] if opcode[1] == "wide" else _masked(x[0] * x[1] + x[2], bits)
        if name == "setp":
            found = COMPARE[opcode[1]](wide(x[0]), wide(x[1]))
            return (found & (x[2] != 0) if opcode[2] == "and" else found).astype(np.uint64)
        if name == "selp":
            return np.where(x[2] != 0, x[0], x[1])
        if name == "vote":
            held = (x[0] != 0).reshape(-1, 32)
            ballot = (held << np.arange(32)).sum(1).astype(np.uint64)
            return np.repeat(ballot if opcode[2] == "ballot" else (ballot != 0).astype(np.uint64), 32)
        if name == "shfl":
            assert opcode[2] == "idx"
            lane, keeps = (THREADS % np.uint64(32)), (x[2] >> np.uint64(8)) & np.uint64(31)
            of = (lane & keeps) | (x[1] & (np.uint64(31) & ~keeps))
            return x[0][(THREADS - lane + of).astype(int)]
        raise NotImplementedError(".".join(opcode))


def _operands(text: str) -> list[str]:
    return [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


class _Context:
    """The launch context of a body: it keeps the TMA copies that it is asked for."""

    def __init__(self) -> None:
        self.copies: list[dict[str, Any]] = []

    def async_copy(self, **facts: Any) -> None:
        self.copies.append(facts)


class Inline:
    """In place of `ptx.inline`, for NumPy's arrays and `Ref`s; `evaluated` has the names of the bodies."""

    def __init__(self) -> None:
        self.evaluated: set[str] = set()

    def __call__(self, body: Callable[..., Any], *operands: Any, result: Any = None, static: Any = None) -> Any:
        vars(body)["static"] = static or {}
        values = [x[0] if isinstance(x, tuple) else x for x in operands]
        layouts = [x[1] if isinstance(x, tuple) else None for x in operands]
        values = [x if isinstance(x, Ref) else np.asarray(x) for x in values]
        model = models.of(body)
        assert model is not None, f"{body.__name__} has no model"
        copied = [Ref(x.data) if isinstance(x, Ref) else x for x in values]
        machine = () if getattr(body, "interpret", None) else (Machine(),)
        expected = model(*machine, *copied)
        expected = expected[1] if getattr(body, "interpret", None) else expected
        found = _evaluated(body, values, layouts, result)
        for mine, other in zip(values, copied, strict=True):
            if isinstance(mine, Ref):
                np.testing.assert_array_equal(mine.data, other.data, f"memory after {body.__name__}")
        self.evaluated.add(body.__name__)
        if result is None:
            return None
        want = np.asarray(expected[0]).astype(result[1])
        if result[0] == ():
            # A vote of each warp, of which the model knows whether any is not 0.
            assert found.max() == want.view(np.uint32), body.__name__
        else:
            slack = ROUNDED.get(body.__name__, 0.0)
            np.testing.assert_allclose(found, np.broadcast_to(want, result[0]), 0, slack, err_msg=body.__name__)
        return np.broadcast_to(want, result[0])


def _evaluated(body: Callable[..., Any], values: list[Any], layouts: list[Any], result: Any) -> Any:
    """Runs a body; its result as an array, or one integer a thread."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        for name, version in (("major", 9), ("minor", 0)):
            module.operation.attributes[f"mosaic_gpu.arch_{name}"] = ir.IntegerAttr.get(ptx.i32(), version)
        memory = Memory([x for x in values if isinstance(x, Ref)])
        starts, block = iter(memory.starts), _Block(memory)
        kinds: list[ir.Type] = []
        given: list[Any] = []
        for x, layout in zip(values, layouts, strict=True):
            if isinstance(x, Ref):
                kinds.append(ir.MemRefType.get(x.shape, _element(x.dtype)))
                strides, _ = ir.MemRefType(kinds[-1]).get_strides_and_offset()
                given.append((np.full(len(THREADS), next(starts), np.uint64), 0 * THREADS, strides))
            elif layout is None:
                kinds.append(ptx.i32())
                given.append(np.full(len(THREADS), int(x) & 0xFFFFFFFF, np.uint64))
            else:
                of = places(layout.to_mgpu(), x.shape)
                bare = x if x.dtype.kind not in "iub" else x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint64)
                kinds += [ir.VectorType.get((of.shape[2],), _element(x.dtype))] * len(of)
                given += list(bare.reshape(-1)[of])
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("body", ir.FunctionType.get(kinds, []))
        entry = function.add_entry_block()
        block.values.update(zip(entry.arguments, given, strict=True))
        context, arguments = _Context(), iter(entry.arguments)
        with ir.InsertionPoint(entry):
            found = body(context, *(_argument(x, layout, arguments) for x, layout in zip(values, layouts, strict=True)))
            func.ReturnOp([])
        with np.errstate(over="ignore"):
            block.run(entry)
            for copy in context.copies:
                _copy(block, copy)
        if found is None:
            return None
        registers = [block.get(x) for x in found.registers.flat]
        if result[0] == ():
            (word,) = registers
            return word.astype(np.uint32)
        dtype, of = np.dtype(result[1]), places(result[2].to_mgpu(), result[0])
        array = np.empty(int(np.prod(result[0])), dtype)
        for place, register in zip(of, registers, strict=True):
            as_type = register.astype(f"uint{8 * dtype.itemsize}").view(dtype) if dtype.kind in "iu" else register
            array[place] = as_type.reshape(place.shape)
        for place, register in zip(of, registers, strict=True):  # threads that share an element agree
            as_type = register.astype(f"uint{8 * dtype.itemsize}").view(dtype) if dtype.kind in "iu" else register
            np.testing.assert_array_equal(array[place], as_type.reshape(place.shape))
        return array.reshape(result[0])


def _argument(x: Any, layout: Any, arguments: Any) -> Any:
    if isinstance(x, Ref):
        return next(arguments)
    if layout is None:
        return mgpu.FragmentedArray.splat(next(arguments), (), is_signed=True)
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape(x.shape), dtype=object)
    for i in range(registers.size):
        registers.flat[i] = next(arguments)
    signed = None if x.dtype.kind not in "iu" else x.dtype.kind == "i"
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _copy(block: _Block, facts: dict[str, Any]) -> None:
    """A TMA copy that each thread issues whose predicate holds; what lies outside of the source becomes zeros."""
    start, offset, strides = block.get(facts["dst_ref"])
    kind, source = (ir.MemRefType(facts[name].type) for name in ("dst_ref", "src_ref"))
    at, _, source_strides = block.get(facts["src_ref"])
    size, memory = _dtype(kind.element_type).itemsize, block.memory
    number = lambda x, thread: int(block.get(x)[thread]) if isinstance(x, ir.Value) else int(x)
    parts = [(p.base, p.length) if isinstance(p, mgpu.DynamicSlice) else (p, 0) for p in facts["gmem_slice"]]
    assert [n for _, n in parts if n] == list(kind.shape), "the copy's sizes"
    to = np.ravel(sum(i * stride for i, stride in zip(np.indices(kind.shape), strides, strict=True)))
    for thread in np.flatnonzero(block.get(facts["predicate"])):
        box = np.indices([n or 1 for _, n in parts])
        place = [np.ravel(i) + number(first, thread) for i, (first, _) in zip(box, parts, strict=True)]
        inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(place, source.shape, strict=True)])
        from_ = size * sum(i * stride for i, stride in zip(place, source_strides, strict=True)) + int(at[thread])
        for part, into in zip(from_[inside], to[inside], strict=True):
            held = memory._at(int(part), size)
            memory._at(int(start[thread]) + size * (int(offset[thread]) + int(into)), size)[:] = held
        for into in to[~inside]:
            memory._at(int(start[thread]) + size * (int(offset[thread]) + int(into)), size)[:] = 0
