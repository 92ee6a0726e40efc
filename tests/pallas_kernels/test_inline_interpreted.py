"""What stands inside `ptx.inline`, evaluated beside its model on random and edge operands: see `inline_eval`."""

import ast
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inline_eval
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from inline_eval import Ref

from pallas_kernels.attention import backward_common, gather, tile_scheduler
from pallas_kernels.mosaic import fast_math, pipeline, ptx, votes
from pallas_kernels.top_k import radix_select

RNG = np.random.default_rng(0)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Bodies are evaluated when they are called."""
    found = inline_eval.Inline()
    monkeypatch.setattr(ptx, "inline", found)
    with jax.disable_jit():
        yield found


def numbers(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(jnp.dtype(dtype))


CORNERS = (0, 0, 0, 0), (1, 1, 64, 64), (1, 0, 128, 0), (0, 1, 192, 320)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(
    "shape", [(2, 2, 130, 66), (1, 2, 129, 65), (2, 1, 1, 130), (2, 2, 70, 1), (1, 1, 1, 1)], ids=str
)
def test_tiles_of_what_broadcasts(inline, shape, dtype):
    ref = Ref(RNG.integers(-99, 99, shape).astype(jnp.dtype(dtype)))
    for corner in CORNERS:
        gather.load_tile(ref, corner, 64)
    assert inline.evaluated == {"load_broadcast"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [70, 71])
def test_tiles_that_are_stored_end_where_the_array_does(inline, columns, dtype):
    for corner in ((0, 0, 0), (1, 64, 64), (1, 64, 56)):
        gather.store_tile(Ref(numbers(2, 100, columns, dtype=dtype)), numbers(64, 64, dtype=dtype), corner)
    assert inline.evaluated == {"store_elements"}


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("rows, heads", [(1, 1), (130, 1), (129, 2), (200, 2), (63, 2)])
@pytest.mark.parametrize("repeats", [1, 4])
def test_bits_of_masks(inline, rows, heads, axis, repeats):
    shape = (2, heads, 3, rows, 4) if axis == 3 else (2, heads, 3, 4, rows)
    ref = Ref(RNG.integers(0, 2**32, shape, dtype=np.uint32))
    for batch, row, column in itertools.product((0, 1), (0, 64, 128), (0, 64, 128, 320)):
        gather.load_bits(ref, axis, (batch, heads - 1, row, column), 64, repeats)
    assert inline.evaluated == {"load_words"}


@pytest.mark.parametrize("heads", [1, 2, 4, 64])
def test_numbers_of_packed_heads(inline, heads):
    for pack in (0, 1):
        gather.load_of_heads(Ref(numbers(2 * heads)), pack, heads)
    assert inline.evaluated == {"load_numbers"}


@pytest.mark.parametrize("entries, pages", [(1, 5), (40, 5), (300, 1000)])
def test_pages_that_are_missing(inline, entries, pages):
    """Each entry in turn, of those that are looked at, and of those that are not; the last page that exists, too."""
    found = np.full((2, entries), pages - 1, np.int32)
    for first, end in ((0, entries), (entries // 3, entries), (0, entries // 2), (entries - 1, entries), (0, 0)):
        for entry in sorted({0, first - 1, first, (first + end) // 2, 127, 128, end - 1, end, entries - 1}):
            for wrong in (-1, pages, pages - 1):
                if 0 <= entry < entries:
                    table = found.copy()
                    table[1, entry] = wrong
                    lacks = gather.lacks_page(Ref(table), 1, first, end, pages)
                    assert bool(lacks) == (wrong != pages - 1 and first <= entry < end)
    assert inline.evaluated == ({"vote_missing"})


@pytest.mark.parametrize("pages_first", [False, True])
@pytest.mark.parametrize("page_size, rows, panels", [(16, 32, 2), (64, 32, 1), (8, 64, 4)])
def test_pages_are_copied_where_the_table_says(inline, page_size, rows, panels, pages_first):
    """Up to the table's end, and a tile that goes on behind it."""
    width, entries = panels * 64, 4
    shape = (5, page_size, 2, width) if pages_first else (2, 5, page_size, width)
    source, tables = (
        Ref(RNG.integers(1, 2**15, shape, dtype=np.uint16)),
        Ref(RNG.integers(0, 5, (3, entries)).astype(np.int32)),
    )
    for row in {0, max(entries * page_size - rows, 0), entries * page_size - min(page_size, rows), rows}:
        to, full = Ref(np.zeros((panels, rows, 64), np.uint16)), Ref(np.zeros(1, np.int64))
        pipeline.copy_pages(source, tables, (2, row, 1), to, full, pages_first=pages_first)
        assert to.data.all()
    assert inline.evaluated == {"copy_own_page"}


def test_scores_that_masks_hide(inline):
    x = numbers(64, 128)
    gather.apply_bitmask(x, _words())
    for low, high in ((-3, 200), (0, 127), (64, 63), (5, 90)):
        bounds = [np.clip(RNG.integers(-9, 9, 64) + n, -50, 250).astype(np.int32) for n in (low, high)]
        gather.apply_bounds(x, bounds[0], bounds[1])
        gather.apply_bounds(x, None, bounds[1])
    assert inline.evaluated == {"apply_bits", "apply_between"}


def _words() -> np.ndarray:
    """Four words a row, each twice, as `gather.load_bits` gives them."""
    return RNG.integers(0, 2**32, (64, 4), dtype=np.uint32).repeat(2, 1)


@pytest.mark.parametrize("keys", [320, 321, 64, 1])
@pytest.mark.parametrize("queries", [130, 129])
def test_scores_that_segments_and_positions_hide(inline, queries, keys):
    rows = RNG.integers(0, 4, (2, 1, queries, 1)).astype(np.int32)
    columns = RNG.integers(0, 4, (2, 1, 1, keys)).astype(np.int32)
    for x, batch, row, column in (
        (numbers(64, 64), 0, 0, 0),
        (numbers(64, 128), 1, 64, 256),
        (numbers(64, 64), 1, 128, 0),
    ):
        corner = batch, 0, row, min(column, keys - 1) // 64 * 64
        gather.apply_segments(x, Ref(rows), Ref(columns), corner)
        for bounds in ((None, 0), (-2, None), (-1, 1)):
            gather.apply_positions(x, Ref(rows), Ref(columns), corner, bounds)
    assert inline.evaluated == {"load_broadcast", "apply_tests"}


@pytest.mark.parametrize("left, right", [(None, None), (None, 0), (-70, None), (-5, 9)])
@pytest.mark.parametrize("ragged", [False, True])
def test_scores_of_keys_out_of_bounds(inline, left, right, ragged):
    if not ragged and left is None and right is None:
        return  # is never asked for
    for keys, key, row in itertools.product((1, 63, 64, 129), (0, 64), (0, 64, 128)):
        tile = SimpleNamespace(sequence=backward_common.Sequence(keys, 3, left, right), ragged=ragged)
        backward_common._in_bounds(tile, numbers(64, 64), key, row)
    assert inline.evaluated == {"mask_tile"}


def test_votes_and_products(inline):
    for row in (None, 0, 31, 63):
        held, x, limits = np.zeros(64, np.int32), np.zeros((64, 8), np.float32), np.ones(64, np.float32)
        if row is not None:
            held[row], x[row, row % 8] = 1, (3.0, np.nan)[row % 2]
        votes.warp_any(held)
        votes.warp_any_above(x, 0.5, limits)
    fast_math.scaled_less(0.3, numbers(64, 64), numbers(64, 64))
    assert inline.evaluated == {"vote_any", "vote_above", "multiply_subtract"}


def test_rows_of_panels_that_are_zeroed(inline):
    panels = RNG.integers(1, 2**15, (2, 64, 64), dtype=np.uint16)
    for first in (-1, 0, 1, 31, 32, 63, 64, 100):
        pipeline.zero_rows(Ref(panels), first)
    lse = numbers(64)
    lse[[0, 31, 32, 63]] = np.inf
    lse[5] = -np.inf
    backward_common.zero_rows(Ref(panels), Ref(lse))
    assert inline.evaluated == {"zero_from", "zero_rows_of_warp"}


@pytest.mark.parametrize("dtype", radix_select.KEY_BITS)
@pytest.mark.parametrize("rows, cols", [(9, 334), (4, 64), (1, 1), (7, 33)])
def test_keys_that_are_loaded(inline, rows, cols, dtype):
    for first in range(0, rows + 4, 4):
        radix_select._load(Ref(numbers(rows, cols, dtype=dtype)), first, -(-cols // 32) * 32)
    assert inline.evaluated == {"load_keys"}


@pytest.mark.parametrize("k", [1, 5, 32, 33, 64])
@pytest.mark.parametrize("sorts", [False, True])
def test_columns_that_are_staged_and_stored(inline, k, sorts):
    """Selected columns of rows with ties, of which the first are taken, also where none is larger."""
    for seed in range(4):
        keys = np.random.default_rng(seed).integers(-3, 3 if seed else -2, (4, 64)).astype(np.int32)
        kth = np.sort(keys, 1)[:, -k][:, None]
        left = (k - (keys > kth).sum(1)).astype(np.int32)
        order = np.sign(keys - kth).astype(np.int32)
        columns, staged = Ref(np.full((4, k), -7, np.int32)), Ref(np.full((4, k), -7, np.int32)) if sorts else None
        radix_select._stage(columns, staged, keys, order, left)
        assert (columns.data >= 0).all()
        for rows, first in ((4, 0), (7, 4), (8, 4), (5, 4)):
            radix_select._store(Ref(np.full((rows, k), -9, np.int32)), columns, staged, first)
    assert inline.evaluated == {"stage_selected", "store_selected"}


@pytest.mark.parametrize("fields", [1, 3, 4, 5, 8, 9])
def test_records_of_tiles_lie_side_by_side_in_a_ring(inline, fields):
    ring = Ref(np.full((tile_scheduler.rows(fields), 2), -1, np.int32))
    for t in range(5, 5 + tile_scheduler.RECORDS):
        tile_scheduler.publish(ring, t, [100 * t + i for i in range(fields)])
    records = ring.data.reshape(tile_scheduler.RECORDS, -1)
    assert records.shape[1] == -(-fields // 4) * 4
    for t in range(5, 5 + tile_scheduler.RECORDS):
        assert records[t % tile_scheduler.RECORDS, :fields].tolist() == [100 * t + i for i in range(fields)]
    assert inline.evaluated == {"store_record"}


EVALUATED = {
    *("apply_between", "apply_bits", "apply_tests", "copy_own_page", "load_broadcast", "load_keys", "load_numbers"),
    *("load_words", "mask_tile", "multiply_subtract", "stage_selected", "store_elements", "store_record"),
    *("store_selected", "vote_above", "vote_any", "vote_missing", "zero_from", "zero_rows_of_warp"),
}
# Bodies that no test here evaluates, by the reason: their models run in every kernel that the interpreter runs.
LEFT = {
    "threads that wait for each other, and what they tell": (
        *("acquire_semaphore", "add_warps", "announce", "arrive_at_stage", "arrive_cluster", "arrive_threads"),
        *("await_arrivals", "await_warps", "await_words", "block_sync", "count_tile", "expect_copies"),
        *("fence_shared", "fetch_next_tile", "load_semaphore", "make_barriers", "publish_words", "release_semaphore"),
        *("release_stage", "send", "wait_barrier"),
    ),
    "products of the tensor cores, and their accumulators' order": (
        *("load_fragments", "operation", "reduce_fragments", "store_fragments", "store_squares", "wait_for_numbers"),
    ),
    "copies by TMA of whole tiles": ("copy_vectors", "issue_copies", "store_panels"),
    "Mosaic's own maxima and sums of arrays": ("fold_groups",),
    "what only the compilers hear, and registers that are moved": (
        *("copy_scalar", "first_lane", "first_warp", "keep_loop", "shuffle_first"),
    ),
    "vectors of rows, whose places `models.elements` shares with tests of alignment": (
        *("add_rows", "clear_slots", "fill_elements", "keep_inside", "load_from", "load_mask", "load_number"),
        *("load_record", "load_vectors", "publish", "store_each", "store_over", "store_row_sums", "store_row_values"),
        *("store_vectors", "wrap_tile"),
    ),
}


def test_every_body_has_a_model_and_is_evaluated_or_left_for_a_reason():
    found: dict[str, ast.FunctionDef] = {}
    for path in sorted((Path(gather.__file__).parents[1]).rglob("*.py")):
        tree = ast.parse(path.read_text())
        bodies = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("ptx.inline", "inline"):
                name = ast.unparse(call.args[0])
                found[name] = bodies.get(name)
    assert set(found) == EVALUATED | set(itertools.chain(*LEFT.values()))
    assert len(found) == len(EVALUATED) + sum(map(len, LEFT.values()))
    source = Path(models.__file__).read_text() + "".join(
        path.read_text() for path in Path(gather.__file__).parents[1].rglob("*.py")
    )
    for name in set(found) - {"operation"}:
        assert re.search(rf'def _{name}\(|"{name}": lambda|{name}\.interpret =', source), f"{name} has no model"


def test_a_model_reads_what_its_operation_declares_and_nothing_else():
    """Of `static` alone: no model knows the names of variables in a kernel."""
    text = Path(models.__file__).read_text()
    assert not re.search("closure|freevars|f_locals|cell_contents", text)
    written = {n.name.removeprefix("_"): ast.unparse(n) for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    written |= dict(re.findall(r'"(\w+)": (lambda machine, static.*)', text))
    read: dict[str, set[str]] = {}
    for name, model in written.items():
        of_others = "".join(
            written[other] for other in re.findall(r"_(\w+)\(machine, static,", model.split("\n", 1)[-1])
        )
        read[name] = set(re.findall(r"static\.(\w+)", model + of_others))
    declared: dict[str, set[str]] = {}
    for path in sorted((Path(gather.__file__).parents[1]).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("ptx.inline", "inline"):
                given = next((x.value for x in call.keywords if x.arg == "static"), None)
                if isinstance(given, ast.Dict):
                    declared[ast.unparse(call.args[0])] = {ast.literal_eval(key) for key in given.keys if key}
    products = {"multiply_shared": {"depth"}, "multiply_registers": {"width"}}
    assert declared | products == {name: names for name, names in read.items() if names}
