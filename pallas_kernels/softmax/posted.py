"""Words of 16 bytes in device memory: two numbers and the mark of the row they are of, written and read at once."""

from collections.abc import Callable, Sequence

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.ptx import WARPGROUP, asm, c32, i32, integer, shared_address, thread_in_warpgroup
from pallas_kernels.mosaic.reduce import Exchange

_MARK = 0x7FC5A17E  # a NaN in float32, and two in 16 bits, that arithmetic does not make
_COUNTER = -1  # in the place of a row, of a count


def words(quantities: int) -> int:
    """How many hold so many numbers, two to each."""
    return -(-quantities // 2)


def post(addresses: Sequence[ir.Value], numbers: Sequence[ir.Value], row: ir.Value, wanted: ir.Value) -> None:
    """Writes numbers, two and the row's mark at each address, by the threads that it is `wanted` of."""
    numbers = [*numbers, *[c32(0)] * (2 * len(addresses) - len(numbers))]
    text = (
        f"{{ .reg .b64 lo, hi; .reg .b128 both; mov.b64 lo, {{$1, $2}}; mov.b64 hi, {{$3, {_MARK}}}; "
        "mov.b128 both, {lo, hi}; @$4 st.relaxed.gpu.global.b128 [$0], both; }"
    )
    for k, address in enumerate(addresses):
        asm(text, "l,r,r,r,b,~{memory}", [address, *numbers[2 * k : 2 * k + 2], row, wanted])


def await_posted(
    addresses: Callable[[ir.Value], list[ir.Value]],
    threads: int,
    exchange: Exchange,
    row: ir.Value,
    patience: ir.Value,
    slots: ir.Value,
    barrier: int,
    nap_ns: int,
) -> mgpu.FragmentedArray:
    """Waits for what was posted of a row, for each of so many threads at its `addresses`, and puts it into `slots`.

    Looks again `patience` times. By one warpgroup, which meets at the barrier; an `INTEGER`: 1 if all of it was there.
    """
    lost, text = c32(0), _awaiting(exchange, nap_ns)
    for at in range(0, threads, WARPGROUP):
        of = arith.addi(thread_in_warpgroup(), c32(at))
        waits = arith.cmpi(arith.CmpIPredicate.ult, of, c32(threads))
        slot = arith.addi(shared_address(slots), arith.muli(of, c32(4)))
        operands = [slot, waits, patience, row, *addresses(of)]
        constraints = "=r,r,b,r,r" + ",l" * words(exchange.quantities) + ",~{memory}"
        missing = llvm.inline_asm(i32(), operands, text, constraints, has_side_effects=True)
        lost = arith.ori(lost, missing)
    vote = (
        "{ .reg .pred mine, some; setp.ne.s32 mine, $1, 0; "
        f"barrier.red.or.pred some, {barrier}, {WARPGROUP}, mine; selp.b32 $0, 0, 1, some; }}"
    )
    return integer(llvm.inline_asm(i32(), [lost], vote, "=r,r,~{memory}", has_side_effects=True))


def begin_count(address: ir.Value, wanted: ir.Value) -> None:
    """Makes of what is there a count of none, unless it is a count already, by the thread that it is `wanted` of."""
    text = (
        "{ .reg .b64 lo, hi, mark; .reg .b128 found, none; .reg .pred missing; "
        f"mov.b64 lo, 0; mov.b64 mark, {{$1, {_MARK}}}; mov.b128 none, {{lo, mark}}; mov.b128 found, {{lo, lo}}; "
        "@$2 ld.relaxed.gpu.global.b128 found, [$0]; mov.b128 {lo, hi}, found; setp.ne.and.b64 missing, hi, mark, $2; "
        "@missing atom.relaxed.gpu.global.cas.b128 found, [$0], found, none; }"
    )
    asm(text, "l,r,b,~{memory}", [address, c32(_COUNTER), wanted])


def count_one(address: ir.Value, to: ir.Value, wanted: ir.Value) -> None:
    """Adds one to a count, and writes what it was into shared memory `to`, by the thread that it is `wanted` of.

    What was read and written before is done for whoever counts later.
    """
    text = (
        "{ .reg .b32 before; @$2 fence.acq_rel.gpu; @$2 atom.relaxed.gpu.global.add.u32 before, [$0], 1; "
        "@$2 fence.acq_rel.gpu; @$2 st.shared.u32 [$1], before; }"
    )
    asm(text, "l,r,b,~{memory}", [address, shared_address(to), wanted])


def _awaiting(exchange: Exchange, nap_ns: int) -> str:
    """Each thread's loop, $3 times again: words from $5 on, put into the slots at $1, if $2; $0: one is missing."""
    planes, numbers = range(words(exchange.quantities)), range(exchange.quantities)
    of_another = "setp.ne.and.b64 too, hi, mark, $2; or.pred missing, missing, too; "
    looks = "".join(
        f"@$2 ld.relaxed.gpu.global.b128 both{k}, [${5 + k}]; mov.b128 {{lo{k}, hi}}, both{k}; "
        + (of_another if k else "setp.ne.and.b64 missing, hi, mark, $2; ")
        for k in planes
    )
    clears = "".join(f"mov.b128 both{k}, {{none, none}}; " for k in planes)
    parts = "".join(f"mov.b64 {{n{2 * k}, n{2 * k + 1}}}, lo{k}; " for k in planes)
    stores = "".join(f"@$2 st.shared.b32 [$1 + {4 * q * exchange.slots}], n{q}; " for q in numbers)
    return (
        f"{{ .reg .b64 lo<{len(planes)}>, hi, mark, none; .reg .b128 both<{len(planes)}>; "
        f".reg .b32 n<{2 * len(planes)}>, tries; .reg .pred missing, too, last; "
        f"mov.b64 mark, {{$4, {_MARK}}}; mov.b64 none, 0; {clears}mov.b32 tries, 0; "
        f"AGAIN: {looks}@!missing bra DONE; "
        "add.u32 tries, tries, 1; setp.gt.u32 last, tries, $3; @last bra DONE; "
        f"nanosleep.u32 {nap_ns}; bra AGAIN; "
        f"DONE: {parts}{stores}selp.b32 $0, 1, 0, missing; }}"
    )
