"""What the inline-assembly operations of `pallas_kernels` mean: for each, a few lines in terms of a simulated GPU.

A model is found by the operation's name; what is static in it is what `ptx.inline` was given as `static`.
"""

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import in_flight
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention import tile_scheduler
from pallas_kernels.mosaic import reduce


def of(operation: Callable[..., Any]) -> Callable[..., Any] | None:
    """The model of an operation: its own `interpret`, or the one below that has its name."""
    static = types.SimpleNamespace(**getattr(operation, "static", {}))
    operation = inspect.unwrap(operation)
    name, own = operation.__name__, getattr(operation, "interpret", None)
    model = _SHORT.get(name, globals().get(f"_{name}"))
    if own is not None or model is None:
        return own
    return lambda machine, *arguments: model(machine, static, *arguments)


def elements(tile: Any, cols: int, row: Any, first: Any) -> tuple[tuple[Any, Any], Any]:
    """Row and column of each element of a warpgroup's tile, and whether it lies in the row."""
    r, c = np.arange(tile.shape[0])[:, None], np.arange(tile.shape[1])[None, :]
    if tile.lanes <= 32:
        rows, vectors = row + r, first + c // tile.vector
    else:
        rows, vectors = row + 0 * r, first + r * (tile.registers * 32) + c // tile.vector
    head = _head(rows, cols, tile.vector)
    column = vectors * tile.vector + c % tile.vector - head
    if tile.wraps:
        column = column + tile.shape[1] * (c < head)
    return (rows, column), (column >= 0) & (column < cols)


def _head(row: Any, cols: int, vector: int) -> Any:
    """Elements of the row's first vector that lie before the row, as vectors are aligned in memory."""
    return row * cols % vector


def _existing(row_pred: Any, row: Any, first: Any) -> tuple[tuple[Any, Any], Any]:
    at, inside = elements(row_pred.tile, row_pred.cols, row, first)
    if row_pred.interior:
        return at, inside | True  # nothing is checked, so that an element outside is touched
    return at, inside & (at[0] < row_pred.rows) if row_pred.rows_may_end else inside


def _load_vectors(machine: Any, static: Any, ref: Any, row: Any, first: Any, *labels: Any) -> list[Any]:
    at, inside = _existing(static.row_pred, row, first)
    wanted = labels[0][:, None] >= 0 if labels else True
    return [machine.gather(ref, at, inside & wanted, static.fill)]


def _wrap_tile(machine: Any, static: Any, raw: Any, gmem: Any, row: Any, staged: Any, at: Any, *tail: Any) -> list[Any]:
    tile, v = static.tile, static.tile.vector
    r, c = np.arange(tile.shape[0])[:, None], np.arange(tile.shape[1])[None, :]
    element = (at + (r + 1) * tile.vectors_in_warp) * v + c
    wrapped, of_piece = c < _head(row, gmem.shape[1], v), element < static.vectors * v
    index = jnp.unravel_index(jnp.where(of_piece, element, 0), staged.shape)
    behind = machine.gather(staged, index, wrapped & of_piece, np.uint32([static.fill_word]).view(gmem.dtype)[0])
    for ref in tail:
        after = machine.gather(ref, (c % v + 0 * r,), wrapped & ~of_piece, 0)
        behind = jnp.where(of_piece, behind, after)
    return [jnp.where(wrapped, behind, raw)]


def _store_vectors(machine: Any, static: Any, ref: Any, value: Any, row: Any, first: Any) -> None:
    machine.scatter(ref, *_existing(static.row_pred, row, first), value)


def _load_mask(machine: Any, static: Any, ref: Any, row: Any, first: Any) -> list[Any]:
    (rows, column), inside = _existing(static.row_pred, row, first)
    held = machine.gather(ref, (rows if static.mask_rows > 1 else rows * 0, column), inside, 0)
    return [held.astype(np.float32)]


def _keep_inside(machine: Any, static: Any, z: Any, row: Any, first: Any) -> list[Any]:
    return [jnp.where(_existing(static.row_pred, row, first)[1], z, static.other)]


def _load_number(machine: Any, static: Any, ref: Any, row: Any) -> list[Any]:
    rows = _rows(static.tile, row)
    return [machine.gather(ref, (rows,), rows < static.rows, np.uint32(static.word).view(ref.dtype))]


def _load_from(machine: Any, static: Any, ref: Any, row: Any, column: Any) -> list[Any]:
    rows = _rows(static.tile, row) if static.rows > 1 else 0 * column
    return [machine.gather(ref, (rows, column), column >= 0, 0).astype(np.float32)]


def _store_over(machine: Any, static: Any, ref: Any, column: Any, value: Any, row: Any, first: Any) -> None:
    """By the warpgroup that has the column, which the race detector holds it to."""
    tile, rows = static.tile, _rows(static.tile, row)
    k = (_head(rows, static.cols, tile.vector) + column) // tile.vector - first
    mine = column >= 0
    if tile.lanes > 32:
        mine &= k // (128 * tile.registers) % static.warpgroups == machine.warpgroup
    if static.vectors is not None:
        mine &= (k >= 0) & (k < static.vectors)
    machine.scatter(ref, (rows, column), mine, value)


def _rows(tile: Any, row: Any) -> Any:
    """The row of each number that a register array has for its rows."""
    return row + np.arange(tile.rows) * (tile.lanes <= 32)


def _add_rows(machine: Any, static: Any, ref: Any, z: Any, row: Any) -> list[Any]:
    """Added up in the row's order."""
    tile = static.tile
    head = _head(_rows(tile, row), static.row_pred.cols, tile.vector)
    places = (np.arange(tile.shape[1])[None, :] + head[:, None]) % tile.shape[1]
    return [jnp.take_along_axis(z, places, 1).sum(axis=1)]


def _store_each(machine: Any, static: Any, ref: Any, value: Any, row: Any) -> None:
    rows = row + np.arange(128 // static.tile.lanes)
    machine.scatter(ref, (rows,), rows < static.ref_rows, value[: rows.size])


def _load_keys(machine: Any, static: Any, ref: Any, first: Any) -> list[Any]:
    row, column = first + np.arange(4)[:, None], np.arange(static.width)[None, :]
    inside = (row < static.rows) & (column < static.cols)
    x = machine.gather(ref, (row, column), inside, 0).astype(np.float32)
    return [jnp.where(inside, x, np.uint32(0xFFFFFFFF).view(np.float32))]


def _stage_selected(machine: Any, static: Any, columns: Any, keys: Any, order: Any, left: Any, *staged: Any) -> None:
    warp, column = np.indices(order.shape)
    before = lambda held: held.astype(np.int32).cumsum(axis=1) - held
    is_equal = order == 0
    selected = (order > 0) | (is_equal & (before(is_equal) < left[:, None]))
    at = warp, jnp.where(selected, before(selected), 0)
    for ref, value in zip((columns, *staged), (column, keys), strict=False):
        machine.scatter(ref, at, selected, value)


def _store_selected(machine: Any, static: Any, ref: Any, columns: Any, first: Any, *keys: Any) -> None:
    warp, slot = np.indices((4, static.k))
    exists, place = first + warp < static.rows, slot
    for of in keys:
        key = machine.gather(of, (warp, slot), exists, 0)
        mine, other = key[:, :, None], key[:, None, :]
        place = ((other > mine) | ((other == mine) & (slot[:, None, :] < slot[:, :, None]))).sum(-1)
    machine.scatter(ref, (first + warp, place), exists, machine.gather(columns, (warp, slot), exists, 0))


def _zero_from(machine: Any, static: Any, ref: Any, first: Any) -> None:
    panel, row, column = np.indices(ref.shape)
    machine.scatter(ref, (panel, row, column), row >= first, 0)
    machine.commit_smem()


def _issue_copies(machine: Any, static: Any, full: Any, *operands: Any) -> None:
    if not static.announced:
        machine.expect_bytes(full, static.count)
    following = iter(operands)
    for sizes, in_panels, *_ in static.plans:
        source, to = next(following), next(following)
        starts = [next(following) for extent in sizes if extent is not None]
        (machine.copy_panels if in_panels else machine.copy_tile)(source, sizes, starts, to, full)


def _copy_own_page(machine: Any, static: Any, source: Any, tables: Any, to: Any, full: Any, *at: Any) -> None:
    machine.copy_pages(source, tables, at, to, full, pages_first=static.pages_first)


def _vote_missing(machine: Any, static: Any, tables: Any, batch: Any, first: Any, end: Any) -> list[Any]:
    entries = first + np.arange(128)
    pages = machine.gather(tables, (batch, entries), entries < end, 0)
    return [((pages < 0) | (pages >= static.pages)).any().astype(np.int32)]


def _store_panels(machine: Any, static: Any, source: Any, target: Any, column: Any, *starts: Any) -> None:
    machine.store_panels(source, target, static.sizes, (*starts, column))


def _copy_vectors(machine: Any, static: Any, ref: Any, row: Any, first: Any, to: Any, barrier: Any, label: Any) -> None:
    """The copy is done at once, if not before a fence; what it leaves undefined becomes NaN."""
    row_pred, v = static.row_pred, static.row_pred.tile.vector
    head = _head(row, row_pred.cols, v)
    count = (head + row_pred.cols + v - 1) // v
    here = jnp.where(label >= 0, (count - first).clip(0, static.vectors), 0)
    element = np.arange(static.vectors * v)
    flat = row * row_pred.cols - head + first * v + element
    copied = (element < here * v) & (flat >= 0) & (flat < row_pred.rows * row_pred.cols)
    value = machine.gather(ref, (flat // row_pred.cols, flat % row_pred.cols), copied, np.nan)
    machine.store_copied(to, value.reshape(to.shape))
    machine.expect_bytes(barrier, here * 16)
    machine.complete_bytes(barrier, here * 16)


def _fill_elements(machine: Any, static: Any, ref: Any, row: Any, first: Any, to: Any) -> None:
    row_pred, v = static.row_pred, static.row_pred.tile.vector
    element = np.arange(np.prod(to.shape))
    k, since = element // v, element // v - static.start
    owner = since % static.threads // 128
    owned = (since >= 0) & (k < static.stop) & (owner == machine.warpgroup)
    if not row_pred.aligned:
        owned |= (k == 0) & (machine.warpgroup == 0)
    column = first * v + element - _head(row, row_pred.cols, v)
    outside = (column < 0) | (column >= row_pred.cols)
    machine.scatter(to, np.unravel_index(element, to.shape), owned & outside, np.asarray(static.fill))


def _publish(machine: Any, static: Any, slots: Any, index: Any, *values: Any) -> None:
    for q, value in enumerate(values):
        flat = q * static.buffer.slots + 4 * index + np.arange(4)
        machine.scatter(slots, (flat // slots.shape[1], flat % slots.shape[1]), True, value)


def _count_tile(machine: Any, static: Any, words: Any, to: Any) -> None:
    first = machine.warpgroup == 0
    number = machine.atomic_add(words, first * (np.arange(words.shape[0]) == 0))[0] + 1
    machine.scatter(to, (np.zeros(1, np.int32),), first, number)


def _store_record(machine: Any, static: Any, words: Any, *numbers: Any) -> None:
    machine.scatter(words, np.unravel_index(np.arange(len(numbers)), words.shape), True, jnp.stack(numbers))


def _load_record(machine: Any, static: Any, words: Any, t: Any) -> list[Any]:
    row, column = np.indices((static.rows, static.columns)).reshape(2, -1)
    found = machine.gather(words, (t % tile_scheduler.RECORDS * static.size + row, column), True, 0)
    return [found[i] for i in range(row.size)]


def _fold_groups(machine: Any, static: Any, x: Any) -> list[Any]:
    operation = jnp.add if static.operation is operator.add else jnp.maximum
    parts = [x[:, start : start + static.columns] for start in range(0, x.shape[1], static.columns)]
    while len(parts) > 1:
        parts = [*map(operation, parts[:-1:2], parts[1::2]), *parts[len(parts) // 2 * 2 :]]
    return parts


def _publish_words(machine: Any, static: Any, words: Any, row: Any, rank: Any, *values: Any) -> None:
    for q, value in enumerate(values):
        bits = lax.bitcast_convert_type(value[:1], np.int32)
        machine.set_words(words, _word(static.buffer, row, q) + rank, bits, active=machine.warpgroup == 0)


def _await_words(machine: Any, static: Any, words: Any, slots: Any, row: Any) -> None:
    of = np.arange(static.buffer.num_ranks)
    for q in range(static.buffer.num_values):
        numbers = machine.await_words(words, _word(static.buffer, row, q), of.size, -1)
        mine = of % static.threads // 128 == machine.warpgroup
        machine.scatter(slots, (q + 0 * of, of), mine, lax.bitcast_convert_type(numbers, np.float32))


def _word(buffer: Any, row: Any, value_index: int) -> Any:
    return 1 + (row * buffer.num_values + value_index) * buffer.num_ranks


def _send(machine: Any, static: Any, slots: Any, barrier: Any, index: Any, *values: Any) -> None:
    for cta in range(static.ctas):
        _publish(machine, static, machine.peer(slots, cta=cta), index, *values)
        machine.complete_bytes(machine.peer(barrier, cta=cta), 4 * 4 * len(values))


def _clear_slots(machine: Any, static: Any, slots: Any) -> None:
    buffer = static.buffer
    turn, q, spare = np.indices((2, buffer.num_values, buffer.slots - buffer.num_ranks))
    fill = np.where((q == 0) & (buffer.num_values > 1), -np.inf, 0.0)
    mine = spare % static.threads // 128 == machine.warpgroup
    machine.scatter(slots, (turn, q, buffer.num_ranks + spare), mine, fill)


def _in_fragments(x: Any) -> Any:
    """A square's numbers as the registers have them: the inverse of `wgmma.rows_of_squares`."""
    return x.reshape(4, 2, 8, 4, 2, 4, 2).transpose(0, 1, 3, 2, 5, 4, 6).reshape(16, 256)


def _load_fragments(machine: Any, static: Any, source: Any) -> list[Any]:
    places = np.asarray(_in_fragments(np.arange(64 * 64).reshape(64, 64))).reshape(-1)
    return [machine.load(source).reshape(-1)[np.argsort(places)].reshape(64, 64)]


def _add_warps(machine: Any, static: Any, source: Any, target: Any) -> None:
    machine.commit_smem()
    machine.copy_added(source, target)


def _reduce_fragments(machine: Any, static: Any, target: Any, sums: Any) -> None:
    machine.atomic_add(target, _in_fragments(sums))


def _store_squares(machine: Any, static: Any, target: Any, factor: Any) -> None:
    row, column = np.indices(factor.shape)
    machine.scatter(target, (column // 64, row, column % 64), True, factor)


def _store_row_values(machine: Any, static: Any, target: Any, values: Any, batch: Any, head: Any, row: Any) -> None:
    line, packed = np.arange(64), static.packed
    query, of_head = row + line // packed, head * packed + line % packed
    at = (query, of_head) if static.queries_first else (of_head, query)
    machine.scatter(target, (batch, *at), query < static.queries, values)


def _zero_rows(machine: Any, static: Any, target: Any, lse: Any) -> None:
    panel, row, column = np.indices(target.shape)
    machine.scatter(target, (panel, row, column), (machine.load(lse) == np.inf)[:, None] & (column >= 0), 0)


def _zero_rows_of_warp(machine: Any, static: Any, target: Any, lse: Any) -> None:
    _zero_rows(machine, static, target, lse)
    machine.commit_smem()


def _mask_tile(machine: Any, static: Any, x: Any, keys: Any, most: Any, least: Any) -> list[Any]:
    at, column = np.indices(static.shape)
    seen = at < keys if static.ragged else at >= 0
    if static.right is not None:
        seen &= at - column <= most
    if static.left is not None:
        seen &= at - column >= least
    return [jnp.where(seen, x, -jnp.inf)]


def _load_broadcast(machine: Any, static: Any, ref: Any, *corner: Any) -> list[Any]:
    """A tile of an array with broadcast extents: zeros past its end."""
    rows, columns = np.arange(64)[:, None] + corner[2], np.arange(static.columns)[None, :] + corner[3]
    at = (corner[0], corner[1], rows, columns)
    inside = True
    for extent, index in zip(static.shape[2:], at[2:], strict=True):
        inside = inside & ((index < extent) | (extent == 1))
    index = tuple(i * (extent > 1) for extent, i in zip(static.shape, at, strict=True))
    return [machine.gather(ref, index, inside & (rows >= 0) & (columns >= 0), 0)]


def _store_elements(machine: Any, static: Any, target: Any, values: Any, batch: Any, row: Any, column: Any) -> None:
    rows, columns = np.arange(64)[:, None] + row, np.arange(values.shape[1])[None, :] + column
    inside = (rows < target.shape[1]) & (columns < target.shape[2])
    machine.scatter(target, (batch, rows, columns), inside, values)


def _load_words(machine: Any, static: Any, ref: Any, batch: Any, head: Any, row: Any, column: Any) -> list[Any]:
    rows, places = np.arange(64)[:, None] // static.repeats + row, np.arange(8)[None, :] // 2
    at = (batch, head, column // 128, *((rows, places) if static.row_axis == 3 else (places, rows)))
    index = tuple(i * (extent > 1) for extent, i in zip(static.shape, at, strict=True))
    words = machine.gather(ref, index, (rows < static.rows) | (static.rows == 1), 0)
    return [words >> (column % 128 // 4).astype(np.uint32)]


def _load_numbers(machine: Any, static: Any, ref: Any, pack: Any) -> list[Any]:
    return [machine.gather(ref, (pack * static.heads + np.arange(64) % static.heads,), True, 0)]


def _apply_bits(machine: Any, static: Any, x: Any, words: Any) -> list[Any]:
    column = np.arange(x.shape[1])
    held = words[:, column % 8] >> (column // 8 * 2 + column % 2).astype(np.uint32) & 1
    return [jnp.where(held == 1, x, -jnp.inf)]


def _apply_between(machine: Any, static: Any, x: Any, high: Any, *low: Any) -> list[Any]:
    column = np.arange(x.shape[1])
    seen = column <= high[:, None]
    for bound in low:
        seen &= column >= bound[:, None]
    return [jnp.where(seen, x, -jnp.inf)]


def _apply_tests(machine: Any, static: Any, ref: Any, x: Any, rows: Any, batch: Any, column: Any) -> list[Any]:
    column = column + np.arange(x.shape[1])
    of_columns = machine.gather(ref, (batch, 0, 0, column), column < static.size, 0)
    holds = {"eq": jnp.equal, "sle": jnp.less_equal, "sge": jnp.greater_equal}
    seen = [holds[test](rows[:, :1] + more, of_columns) for test, more in static.tests]
    return [jnp.where(functools.reduce(jnp.logical_and, seen), x, -jnp.inf)]


def _vote_above(machine: Any, static: Any, x: Any, limits: Any) -> list[Any]:
    return [(~(x.max(axis=1) * np.float32(static.factor) <= limits)).any().astype(np.int32)]


def _store_row_sums(machine: Any, static: Any, target: Any, sums: Any, batch: Any, head: Any, row: Any) -> None:
    line, packed = np.arange(64)[:, None], static.packed
    query, of_head = row + line // packed, head * packed + line % packed
    column = static.column + np.arange(sums.shape[1])[None, :]
    machine.scatter(target, (batch, query, of_head, column), query < target.shape[1], sums)


def _multiply_shared(machine: Any, static: Any, left: Any, right: Any, *sums: Any) -> list[Any]:
    factors = (_columns(machine.load_as_product(ref))[:, : -(-static.depth // 16) * 16] for ref in (left, right))
    x, y = (factor.astype(jnp.float32) for factor in factors)
    return [in_flight.begin_in_registers(machine, [left, right], sum(sums, x @ y.T))]


def _multiply_registers(machine: Any, static: Any, left: Any, right: Any, sums: Any) -> list[Any]:
    factor = _columns(machine.load_as_product(right))[:, : static.width].astype(jnp.float32)
    return [in_flight.begin_in_registers(machine, [right], sums + left.astype(jnp.float32) @ factor)]


def _multiply_transposed(machine: Any, static: Any, *refs: Any) -> list[Any]:
    count = len(refs) // 2
    left = [machine.load_as_product(ref).astype(jnp.float32) for ref in refs[:count]]
    right = [_columns(machine.load_as_product(ref)).astype(jnp.float32) for ref in refs[count:]]
    total = sum(x.T @ y for x, y in zip(left, right, strict=True))
    return [in_flight.begin_in_registers(machine, list(refs), total)]


def _columns(panels: Any) -> Any:
    return panels.swapaxes(0, 1).reshape(panels.shape[1], -1)


# Of what is one step of the machine, or none.
_SHORT: dict[str, Callable[..., Any]] = {
    "make_barriers": lambda machine, static, ref: machine.start_barriers(ref, static.arrivals),
    "announce": lambda machine, static, ref: machine.expect_bytes(ref, static.count),
    "arrive_threads": lambda machine, static, ref: machine.arrive_often(ref, 128),
    "wait_barrier": lambda machine, static, ref, parity: machine.wait_parity(ref, parity),
    "release_stage": lambda machine, static, ref: [machine.arrive_last(ref, 4)],
    "arrive_at_stage": lambda machine, static, ref: [machine.arrive_last(ref, 4)],
    "first_warp": lambda machine, static: [jnp.int32(machine.warpgroup == 0)],
    "expect_copies": lambda machine, static, ref, count: machine.expect_bytes(ref, count),
    "fetch_next_tile": lambda machine, static, words: [machine.atomic_add(words, np.ones(words.shape, np.int32))[0]],
    "block_sync": lambda machine, static: machine.block_sync(reduce.BLOCK, static.warpgroups),
    "arrive_cluster": lambda machine, static: machine.cluster_arrive(),
    "await_arrivals": lambda machine, static: machine.cluster_wait(),
    "copy_scalar": lambda machine, static, x: [x],
    "load_semaphore": lambda machine, static, semaphore: [machine.atomic_add(semaphore, np.zeros((), np.int32))],
    # Blocks run one after another here: whoever has to wait for a later one would wait forever.
    "acquire_semaphore": lambda machine, static, semaphore, value, ended: machine.demand_at_least(semaphore, value),
    "release_semaphore": lambda machine, static, semaphore: machine.count(semaphore),
    "fence_shared": lambda machine, static: machine.commit_smem(),
    "await_warps": lambda machine, static: machine.await_copies_read(),
    "store_fragments": lambda machine, static, target, sums: machine.store(target, _in_fragments(sums)),
    "first_lane": lambda machine, static, x: [x],
    # Lanes have no numbers of their own here: an array has one for each of a tile's rows.
    "shuffle_first": lambda machine, static, value: [value],
    "vote_any": lambda machine, static, x: [x.any().astype(np.int32)],
    "multiply_subtract": lambda machine, static, x, y: [x * np.float32(static.factor) - y],
    # Only the compilers hear these.
    "keep_loop": lambda machine, static: None,
    "wait_for_numbers": lambda machine, static, x: None,
}
