"""The backward kernel's unit of work: a block of keys, and the steps by which blocks of queries come past it."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import gather, pairs, schedule, tile_scheduler
from pallas_kernels.attention.configs import AnyBackwardConfig
from pallas_kernels.attention.problem import Attention
from pallas_kernels.emit import Index


class Span(NamedTuple):
    """Blocks of queries `first <= i < end`; of them `inner_first <= i < inner_end` need no comparison.

    Of indices, that is, of segment ids and with the mask.
    """

    first: Any
    inner_first: Any
    inner_end: Any
    end: Any

    def narrowed(self, by: "Span") -> "Span":
        """The blocks of both, which need no comparison if neither does."""
        first = _clip(by.first, self.first, self.end)
        end = _clip(by.end, first, self.end)
        inner_first = _clip(jnp.maximum(self.inner_first, by.inner_first), first, end)
        inner_end = _clip(jnp.minimum(self.inner_end, by.inner_end), inner_first, end)
        return Span(first, inner_first, inner_end, end)


class Sequence(NamedTuple):
    """What there is of an element of the batch, and its `schedule.bounds`."""

    keys: Any
    queries: Any  # blocks of them
    left: Any
    right: Any


class Step(NamedTuple):
    """One block of queries against the block of keys; `n` counts the steps of all blocks of keys before, too."""

    head: Any
    i: Any
    n: Any
    starts: Any  # whether it is the first one for these keys
    visit: Any  # `first <= visit < end` of the span: `i`, unless blocks begin apart


Compare = bool | jax.Array  # whether indices, segment ids and mask matter


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of keys: the problem, its references, and which keys they are."""

    problem: Attention
    config: Any  # an `AnyBackwardConfig`: which one, its kernel knows
    refs: SimpleNamespace  # operands, results and scratch
    batch: jax.Array
    key_head: jax.Array
    index: jax.Array
    sequence: Sequence
    span: Span
    steps_before: jax.Array
    t: Any = None  # which of the CTA's tiles it is, where a ring tells

    @classmethod
    def of_record(
        cls, problem: Attention, config: AnyBackwardConfig, refs: SimpleNamespace, record: Any, t: Any
    ) -> "Block":
        """The block that the record of the CTA's tile `t` names."""
        batch, key_head, index, steps_before, *span = record
        sequence = sequence_at(problem, config, refs, batch)
        return cls(problem, config, refs, batch, key_head, index, sequence, Span(*span), steps_before, t)

    @property
    def record(self) -> tuple[Any, ...]:
        """What `of_record` needs."""
        return self.batch, self.key_head, self.index, self.steps_before, *self.span

    @classmethod
    def of(
        cls,
        problem: Attention,
        config: AnyBackwardConfig,
        refs: SimpleNamespace,
        tile: jax.Array,
        steps_before: jax.Array,
        span: Span | None = None,
    ) -> "Block":
        """The `tile`th of all blocks of keys; its `span` may be known."""
        per_head, together = -(-problem.key_length // config.block_kv), _together(problem, config)
        section, tile = lax.div(tile, per_head * together), lax.rem(tile, per_head * together)
        index, head = lax.div(tile, together), section * together + lax.rem(tile, together)
        batch, key_head = _place(problem, head)
        if latest_first(problem, config):
            index = (per_head - 1) - index
        sequence = sequence_at(problem, config, refs, batch)
        if span is None and problem.hidden_by_data:
            at = gather.broadcast_index((batch, key_head, index), refs.spans.shape)
            span = Span(*(refs.spans[*at, i] for i in range(4)))
        elif span is None:
            span = _span(problem, config, index * config.block_kv, sequence)
        return cls(problem, config, refs, batch, key_head, index, sequence, span, steps_before)

    @property
    def first_key(self) -> jax.Array:
        return self.index * self.config.block_kv

    @property
    def group(self) -> int:
        """Query heads that read these keys."""
        return self.problem.query_heads // self.problem.key_heads

    @property
    def ragged(self) -> bool:
        """Whether a block of keys may hold some that do not exist."""
        return _ragged(self.problem, self.config)

    @property
    def steps(self) -> Any:
        return self.group * (self.span.end - self.span.first)

    @property
    def stages_filled(self) -> Any:
        """Steps, and as many stages without one that each tile fills all stages of a CTA that has more tiles."""
        return jnp.maximum(self.steps, self.config.stages)

    def place_of(self, local: Any) -> tuple[Any, Any]:
        """The head and the block of queries of the tile's step `local`; the latter is -1 where there is no such step."""
        length = self.span.end - self.span.first
        h, i = 0, local
        if self.group > 1:
            some = jnp.maximum(length, 1)
            h, i = lax.div(local, some), lax.rem(local, some)
        i = self._visited(self.span.first + i)
        return self.key_head * self.group + h, jnp.where(local < self.steps, i, -1)

    def place_after(self, step: Step, steps: int) -> tuple[Any, Any]:
        """The same of the step that follows so many steps after another one, where there is one."""
        length = self.span.end - self.span.first
        head, i = step.head, step.visit + steps
        for _ in range(steps * (self.group > 1)):
            wraps = (i >= self.span.end).astype(jnp.int32)
            head, i = head + wraps, i - wraps * length
        return head, self._visited(i)

    def step(self, h: Any, i: jax.Array) -> Step:
        """Head `h` of the group, the `i`th block of queries."""
        n = h * (self.span.end - self.span.first) + (i - self.span.first)
        return Step(self.key_head * self.group + h, self._visited(i), self.steps_before + n, n == 0, i)

    def _visited(self, i: jax.Array) -> jax.Array:
        """Which block of queries is the `i`th: of those that need no comparison the first is another for each block."""
        if not self.config.apart:
            return i
        _, first, end, _ = self.span
        later = i + lax.rem(self.index, jnp.maximum(end - first, 1))
        later = jnp.where(later >= end, later - (end - first), later)
        return jnp.where((first <= i) & (i < end), later, i)

    def each_head[Carry](self, visit: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        """`carry = visit(h, carry)` for each head of the group."""
        return visit(0, carry) if self.group == 1 else lax.fori_loop(0, self.group, visit, carry)

    def each_step_alike(self, visit: Callable[[Step], None]) -> None:
        """`visit(step)` for the same steps in the same order, for those who do not compare indices."""

        def of_head(h: Any, _: None) -> None:
            pl.loop(self.span.first, self.span.end)(lambda i: visit(self.step(h, i)))

        self.each_head(of_head, None)

    def again(self, later: Any = 0, *, uniform: bool = True) -> "Block":
        """The CTA's tile `later` tiles on, read from the ring again, so that registers need not keep it meanwhile."""
        if self.t is None:
            return self
        t = self.t + later
        record = tile_scheduler.read(self.refs.tile_smem, t, uniform=uniform)
        return self.of_record(self.problem, self.config, self.refs, record, t)

    def each_step[Carry](self, visit: Callable[["Block", Step, Compare, Carry], Carry], carry: Carry) -> Carry:
        """`carry = visit(block, step, compare, carry)` for each head of the group and block of queries that sees keys.

        Where there are segments or a mask, `compare` is known in the kernel alone, in one loop: of three, D = 64 spills
        60 bytes instead of 12 (segments).
        """
        _, _, left, right = self.sequence

        def of_head(h: Any, carry: Carry) -> Carry:
            def piece(start: str, stop: str, compare: Callable[[Span, Any], Compare], carry: Carry) -> Carry:
                block = self.again()

                def step(i: jax.Array, carry: Carry) -> Carry:
                    return visit(block, block.step(h, i), compare(block.span, i), carry)

                return lax.fori_loop(getattr(block.span, start), getattr(block.span, stop), step, carry)

            if self.problem.hidden_by_data:
                return piece("first", "end", lambda span, i: (i < span.inner_first) | (i >= span.inner_end), carry)
            if right is not None or self.ragged:
                carry = piece("first", "inner_first", lambda span, i: True, carry)
            carry = piece("inner_first", "inner_end", lambda span, i: False, carry)
            if left is not None:
                carry = piece("inner_end", "end", lambda span, i: True, carry)
            return carry

        return self.each_head(of_head, carry)


def spans(problem: Attention, config: AnyBackwardConfig, ops: SimpleNamespace, found: pairs.Pairs) -> jax.Array:
    """The spans of all blocks of keys, `[B|1, K|1, blocks, 4]`, of pairs of blocks of keys and of queries."""
    found = pairs.of_group(found, problem.query_heads // problem.key_heads)
    met = pairs.spans(found, -(-problem.query_length // config.block_q))
    first_keys = jnp.arange(0, problem.key_length, config.block_kv)[None, None, :]
    span = _span(problem, config, first_keys, sequence_at(problem, config, ops, (slice(None), None, None)))
    return jnp.stack(span.narrowed(Span(*(met[..., i] for i in range(4)))), axis=3)


def sequence_at(problem: Attention, config: AnyBackwardConfig, operands: SimpleNamespace, batch: Any) -> Sequence:
    """The sequence at `batch`, or the sequences."""
    keys, queries = problem.key_length, problem.query_length
    if problem.key_lengths:
        keys = jnp.minimum(operands.key_lengths[batch], keys)
    if problem.query_lengths:
        queries = jnp.minimum(operands.query_lengths[batch], queries)
    blocks = div(queries + (config.block_q - 1), config.block_q)
    return Sequence(keys, blocks, *schedule.bounds(problem, queries, keys))


def _ragged(problem: Attention, config: AnyBackwardConfig) -> bool:
    return problem.key_lengths or problem.key_length % config.block_kv != 0


def _span(problem: Attention, config: AnyBackwardConfig, key: Index, sequence: Sequence) -> Span:
    """The blocks of queries that see some of the block of keys from `key` on."""
    keys, queries, left, right = sequence
    block_q, last = config.block_q, key + (config.block_kv - 1)
    first, inner_first, inner_end, end = 0, 0, queries, queries
    if right is not None:
        first = div(key - right, block_q)
        inner_first = div(last - right + (block_q - 1), block_q)
    if left is not None:
        end = _clip(div(last - left + block_q, block_q), 0, queries)
        inner_end = div(key - left + 1, block_q)
    first = _clip(first, 0, end)
    if _ragged(problem, config):
        end = first + (end - first) * jnp.int32(key < keys)
        inner_first = jnp.maximum(inner_first, end * jnp.int32(last >= keys))
    inner_first = _clip(inner_first, first, end)
    return Span(first, inner_first, _clip(inner_end, inner_first, end), end)


def latest_first(problem: Attention, config: AnyBackwardConfig) -> bool:
    """Whether the last block of keys has the first turn.

    Under a bound on the right it begins at the last queries, so that nobody waits for blocks that come before.
    """
    return config.turns and schedule.bounds(problem)[1] is not None


def _together(problem: Attention, config: AnyBackwardConfig) -> int:
    """Of how many heads the blocks of keys are started in turn."""
    heads = problem.batch * problem.key_heads
    return max(g for g in range(1, config.together + 1) if heads % g == 0)


def _place(problem: Attention, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The batch element and the key head that is the `head`th in order."""
    if problem.bias is not None and problem.bias[0] == 1 and 1 not in problem.bias[1:]:
        # Sequence after sequence of a head, whose bias they share in the cache.
        return lax.rem(head, problem.batch), lax.div(head, problem.batch)
    return lax.div(head, problem.key_heads), lax.rem(head, problem.key_heads)


def div(x: Index, y: int) -> Any:
    """`max(x, 0) // y`."""
    return max(x, 0) // y if isinstance(x, int) else lax.div(jnp.maximum(x, 0), jnp.int32(y))


def _clip(x: Index, low: Index, high: Index) -> Any:
    if all(isinstance(v, int) for v in (x, low, high)):
        return min(max(x, low), high)
    return jnp.minimum(jnp.maximum(x, low), high)
