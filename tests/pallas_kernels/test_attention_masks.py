"""What a mask lets the attention kernels pass over, and how its bits are packed, against the mask itself."""

import dataclasses
import itertools
from typing import Any

import attention_cases
import jax
import mask_patterns
import numpy as np
import numpy_eval
import pytest
import test_attention_backward
import test_attention_forward
from test_attention_segments import check_backward_visits, check_forward_visits, in_blocks

from pallas_kernels.attention import mask as masks
from pallas_kernels.attention.problem import Attention, ForwardConfig, Op
from tests.pairwise import pairwise

RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": (100, 37), "window_offset": 20},
    "lengths": {"key_lengths": True, "query_lengths": True, "segments": True, "causal_offset": 0},
    "ends": {"key_lengths": True, "query_lengths": True, "causal_offset": 0, "align_ends": True},
}


VISITED = [
    ("".join(x[:4]), x[4], rules)
    for x, rules in zip(
        pairwise("B1", "N1", "T1", "S1", tuple(mask_patterns.PATTERNS)), itertools.cycle(RULES), strict=False
    )
]


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 130, 257), (1, 1, 1, 300), (2, 1, 300, 1), (1, 2, 5, 128)])
def test_every_bit_is_where_its_thread_wants_it(shape, axis):
    mask = np.random.default_rng(0).random(shape) < 0.5
    words = np.asarray(jax.jit(masks.pack_bits, static_argnums=1)(mask.astype(np.int8), axis))
    by_row = np.swapaxes(mask, 2, 3) if axis == 2 else mask
    words = np.moveaxis(words, masks.AXES[axis], (3, 4))
    columns = by_row.shape[3]
    assert words.shape == (*shape[:2], -(-columns // 128), by_row.shape[2], 4)
    found = np.zeros((*by_row.shape[:3], words.shape[2] * 128), bool)
    for column in range(found.shape[3]):
        block, j, q, e = column // 128, column % 128 // 8, column % 8 // 2, column % 2
        found[..., column] = words[:, :, block, :, q] >> (2 * j + e) & 1
    np.testing.assert_array_equal(found[..., :columns], by_row)
    assert (found[..., columns:] == (by_row if columns == 1 else False)).all()


@pytest.mark.parametrize(
    "pattern, axis, blocks",
    [
        (*case, blocks)
        for case, blocks in zip(
            itertools.product(mask_patterns.PATTERNS, (2, 3)),
            itertools.cycle(((128, 64), (192, 128), (64, 64), (128, 128), (64, 64))),
            strict=False,
        )
    ],
)
def test_blocks_that_hold_something_and_everything(pattern, axis, blocks):
    mask = mask_patterns.PATTERNS[pattern](np.random.default_rng(1), (2, 3, 513, 700))
    by_row = np.swapaxes(mask, 2, 3) if axis == 2 else mask
    found_blocks = lambda mask: masks.bitmask_blocks(masks.pack_bits(mask, axis), axis, by_row.shape[3], *blocks)
    pairs = numpy_eval.results(found_blocks, mask)
    for found, whole in zip(pairs, (False, True), strict=True):
        of_heads = in_blocks(by_row.reshape(-1, *by_row.shape[2:]), *blocks, whole=whole)
        np.testing.assert_array_equal(found, of_heads.reshape(2, 3, *of_heads.shape[1:]))


@pytest.mark.parametrize("axis", [2, 3])
def test_of_a_mask_that_is_not_looked_at_all_blocks_are_visited_and_none_is_full(axis):
    p = attention_cases.problem_of(Op.FORWARD, {"mask": "B1TS"}, (130, 200), (8, 8), "bfloat16", (2, 1))
    words = masks.pack_bits(jax.numpy.asarray(attention_cases.operands_of(p, mask="causal")["mask"]), axis)
    columns, blocks = p.mask[axis], (64, 128)
    found, every = (f(words, axis, columns, *blocks) for f in (masks.bitmask_blocks, masks.every_block))
    assert every.visible.all()
    assert not every.full.any()
    assert not found.visible.all()
    assert found.full.any()
    assert [few.shape[2:] for few in every] == [whole.shape[2:] for whole in found]


def problem_of(op: Op, mask: str, rules: str, heads: tuple[int, int] = (2, 1), **more: Any) -> Attention:
    facts = {"mask": mask, **RULES[rules], **more}
    return attention_cases.problem_of(op, facts, (513, 700), (8, 8), "bfloat16", heads)


@pytest.mark.slow
@pytest.mark.parametrize("mask, pattern, rules", VISITED)
def test_forward_visits_what_is_seen(mask, pattern, rules):
    p, config = problem_of(Op.FORWARD, mask, rules), ForwardConfig(128, warpgroups=2)
    check_forward_visits(p, config, exactly=rules == "full", mask=pattern)


@pytest.mark.slow
@pytest.mark.parametrize("mask, pattern, rules", VISITED)
def test_ordered_backward_visits_what_is_seen(mask, pattern, rules):
    p = problem_of(Op.BACKWARD, mask, rules, (4, 2), deterministic=True)
    check_backward_visits(p, exactly=rules == "full", mask=pattern)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.together("mask", "head_dim")
@pytest.mark.parametrize("pattern", mask_patterns.PATTERNS)
@pytest.mark.parametrize("mask", ["BNTS", "B11S"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_forward_on_a_gpu(head_dim, mask, pattern):
    p = test_attention_forward.problem_of("full", (1500, 1501), (head_dim, head_dim), "bfloat16", heads=(3, 1))
    p = dataclasses.replace(p, mask=tuple({"B": 2, "N": 3, "T": 1500, "S": 1501, "1": 1}[x] for x in mask))
    test_attention_forward.check(p, test_attention_forward.whole(p), mask=pattern)


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.together("mask", "head_dim", "deterministic")
@pytest.mark.parametrize("pattern", mask_patterns.PATTERNS)
@pytest.mark.parametrize("mask", ["BNTS", "1NT1"])
@pytest.mark.parametrize("head_dim, deterministic", [(64, False), (128, True), (128, False), (256, True)])
def test_backward_on_a_gpu(head_dim, deterministic, mask, pattern):
    dims, lengths = (head_dim, head_dim), (1500, 1501)
    p = test_attention_backward.problem_of("full", lengths, dims, "bfloat16", (3, 1), deterministic=deterministic)
    p = dataclasses.replace(p, mask=tuple({"B": 2, "N": 3, "T": 1500, "S": 1501, "1": 1}[x] for x in mask))
    test_attention_backward.check(p, test_attention_backward.compiled(p), mask=pattern)
