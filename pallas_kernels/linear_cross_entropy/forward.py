"""The states of the rows of `hidden @ weight`, without the logits: product and online softmax in one kernel.

A CTA of two warpgroups works on tiles of 128 tokens and 256 columns; each warpgroup has 64 of the tokens, whose logits
never leave its registers. A stage of the pipeline holds a step of both factors. The warpgroup that has read a stage
arrives at `empty`; the first one refills the stage when both have, with the step that is `stages - 1` ahead, also of
the CTA's next tile, so that a tile begins with its first steps in shared memory. The states of a few
tiles of the same tokens, side by side, merge in registers: maximum, sum and label's logit and, if asked for, the sum of
`exp(z - max) * z`. XLA merges the states of these groups. Neighbouring groups share tokens or columns, which the CTAs
of a wave find in L2.
For the gradient the tile's `exp(z - m)` is rounded to 16 bits and stored through shared memory: it is as accurate as a
gradient in 16 bits, which logits in 16 bits are not. There m is a number of the row that the caller knows to be near
its logsumexp, or the maximum of the row in the tile.
Traffic: both factors, mostly from L2, and three or four numbers for each token and group of tiles.
Sources: Milakov & Gimelshein 2018, arXiv:1805.02867; Wijmans et al. 2024, arXiv:2411.09009.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hardware, monoid
from pallas_kernels.hardware import Device
from pallas_kernels.mosaic import fast_math, ptx, reduce, votes
from pallas_kernels.mosaic.pipeline import LeaderStages, Scratch
from pallas_kernels.mosaic.ptx import ROW, WGMMA
from pallas_kernels.mosaic.wgmma import tiled

WARPGROUPS = 2
ROWS = 64  # of a warpgroup
_SWIZZLED = (8, 64)  # rows and columns of a swizzled tile of shared memory, of which a matrix has a multiple
_PART = 32  # columns whose weights are computed, and stored, together
_STORES = 4  # parts of a warpgroup that are on their way to global memory


@dataclasses.dataclass(frozen=True)
class Problem:
    """The states of `tokens` rows of `[tokens, embedding] @ [embedding, vocabulary]`; the logits as in `softmax`.

    `transposed`: the second factor comes as `[vocabulary, embedding]`. `weights`: what the gradient needs too, relative
    to given numbers of the rows, or to the maxima of tiles.
    """

    tokens: int
    embedding: int
    vocabulary: int
    dtype: jnp.dtype
    transposed: bool = False
    scale: float = 1.0
    soft_cap: float | None = None
    entropy: bool = False
    weights: Literal["rows", "tiles"] | None = None

    @property
    def padded_vocabulary(self) -> int:
        """Columns of the stored weights."""
        return self.vocabulary + -self.vocabulary % _SWIZZLED[1]


@dataclasses.dataclass(frozen=True)
class Config:
    """Columns of a tile, those of the embedding in a step, stages, tiles of a group, and tiles of tokens of a band."""

    columns: int = 256
    depth: int = 64
    stages: int = 4
    group: int = 4
    band: int = 8

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return WARPGROUPS * ROWS


def unsupported(problem: Problem, device: Device) -> str | None:
    """Says why the kernel does not take the problem."""
    config = Config()
    if problem.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel multiplies 16-bit floats, and the operands are {problem.dtype}"
    if problem.embedding % config.depth or problem.embedding == 0:
        return f"the kernel takes an embedding of a multiple of {config.depth}; it is {problem.embedding}"
    if problem.vocabulary < config.columns:
        return f"the kernel takes {config.columns} columns or more; there are {problem.vocabulary}"
    multiple = _SWIZZLED[not problem.transposed]
    if problem.vocabulary % multiple:
        axes = "vocabulary, embedding" if problem.transposed else "embedding, vocabulary"
        return (
            f"the kernel takes a weight [{axes}] with a vocabulary of a multiple of {multiple}; it is "
            f"{problem.vocabulary}"
        )
    if problem.tokens == 0:
        return "there are no tokens"
    if not 0 < problem.scale < float("inf"):
        return f"the scale is {problem.scale}, not a positive number"
    return None


def num_values(problem: Problem) -> int:
    """Says how many numbers a group of tiles has of each token."""
    return 3 + problem.entropy


@dataclasses.dataclass(frozen=True)
class _Cta:
    """The problem, `shape` tiles of tokens and groups of columns for `ctas` CTAs, and references by their names."""

    problem: Problem
    config: Config
    shape: tuple[int, int]
    ctas: int
    refs: SimpleNamespace

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.problem.embedding // self.config.depth

    def group_coord(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places the CTA's `i`th group among tiles of tokens and groups: in bands of tokens, column by column."""
        rows, columns = self.shape
        band, within = jnp.divmod(lax.axis_index("cta") + i * self.ctas, jnp.int32(self.config.band * columns))
        first = band * self.config.band
        height = jnp.minimum(rows - first, self.config.band)
        column = lax.div(within, height)
        return first + within - column * height, column

    def tokens(self, row: jax.Array) -> pl.Slice:
        """Slices the warpgroup's tokens of a tile."""
        return pl.ds(row * self.config.tokens + lax.axis_index("warpgroup") * ROWS, ROWS)


def _scratch(problem: Problem, config: Config) -> Scratch:
    """Lays out shared memory by name: stages of both factors, their barriers, and weights on their way out."""
    smem = lambda *shape: tiled((config.stages, *shape), problem.dtype)
    stores = {"weights_smem": tiled((WARPGROUPS, _STORES, ROWS, _PART), problem.dtype)} if problem.weights else {}
    return stores | {
        "hidden_smem": smem(config.tokens, config.depth),
        "weight_smem": smem(*((config.columns, config.depth)[:: 1 if problem.transposed else -1])),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages),
    }


def _fill(cta: _Cta, n: jax.Array) -> None:
    """Issues the copies of the CTA's step `n`: some columns of the embedding, of a tile's tokens and vocabulary."""
    problem, config, refs = cta.problem, cta.config, cta.refs
    tile, k = lax.div(n, cta.steps), lax.rem(n, cta.steps)
    group, within = lax.div(tile, config.group), lax.rem(tile, config.group)
    row, column = cta.group_coord(group)
    # Tiles past the end read the last tile again: a copy's start has to be a known multiple of the tile.
    column = jnp.minimum(column * config.group + within, (problem.vocabulary - 1) // config.columns)
    stage = lax.rem(n, config.stages)
    tokens, depth = pl.ds(row * config.tokens, config.tokens), pl.ds(k * config.depth, config.depth)
    columns = pl.ds(column * config.columns, config.columns)
    weight = refs.weight.at[*((columns, depth) if problem.transposed else (depth, columns))]
    plgpu.copy_gmem_to_smem(refs.hidden.at[tokens, depth], refs.hidden_smem.at[stage], refs.full.at[stage])
    plgpu.copy_gmem_to_smem(weight, refs.weight_smem.at[stage], refs.full.at[stage])


def _compute(cta: _Cta, stages: LeaderStages, warpgroup: jax.Array, n: jax.Array, acc: Any) -> None:
    """Adds the product of step `n` to the logits of a warpgroup's tokens."""
    stage, own = stages.wait(n), pl.ds(warpgroup * ROWS, ROWS)
    weight = cta.refs.weight_smem.at[stage]
    weight = weight.transpose((1, 0)) if cta.problem.transposed else weight
    plgpu.wgmma(acc, cta.refs.hidden_smem.at[stage, own], weight)
    plgpu.wgmma_wait(1)  # The product of the step before has ended, and its stage is free.
    stages.release_before(n, warpgroup)


def _finish(cta: _Cta, row: jax.Array, column: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the states of a tile's rows: maximum, sum, label's logit, for the entropy a sum of weighted logits."""
    problem, config, refs = cta.problem, cta.config, cta.refs
    z = x if problem.scale == 1.0 else x * problem.scale
    if problem.soft_cap is not None:
        z = problem.soft_cap * fast_math.tanh_16bit(z * (1.0 / problem.soft_cap))
    first = column * config.columns
    last = problem.vocabulary - 1 - first if problem.vocabulary % (config.group * config.columns) else None
    label = plgpu.load(refs.labels.at[cta.tokens(row)], layout=ROW, optimized=False) - first
    if last is not None:
        label = ptx.where(label <= last, label, jnp.full_like(label, -1))
        z = lax.cond(last < config.columns - 1, lambda z: _own_columns(z, last), lambda z: z, z)
    # In parts, of which few are in registers beside the logits.
    parts = {start: z[:, start : start + _PART] for start in range(0, config.columns, _PART)}
    if problem.weights == "rows":
        maximum = plgpu.load(refs.references.at[cta.tokens(row)], layout=ROW, optimized=False)
    else:
        maximum = functools.reduce(jnp.maximum, parts.values()).max(axis=1)
    label_logit = _label_logit(parts, label)
    by_row = lambda value: lax.broadcast_in_dim(value, parts[0].shape, [0])
    sums = [jnp.zeros_like(parts[0])] * (1 + problem.entropy)
    for start, part in parts.items():
        weights = monoid.decay(part, by_row(maximum), exp=fast_math.exp_16bit)
        if problem.weights:
            _store(cta, row, first + start, weights, part)
        terms = [weights]
        if problem.entropy:
            terms.append(ptx.where(weights == 0.0, jnp.zeros_like(part), weights * part))
        sums = [total + term for total, term in zip(sums, terms, strict=True)]
    if problem.weights == "tiles":
        refs.maxima.at[column, cta.tokens(row)][...] = maximum
    total, *entropy_sum = (part.sum(axis=1) for part in sums)
    return maximum, total, label_logit, *entropy_sum


def _own_columns(z: jax.Array, last: jax.Array) -> jax.Array:
    """Returns a tile's logits, and -inf past its column `last`."""
    at = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=WGMMA)
    return ptx.where(at <= last, z, jnp.full_like(z, -jnp.inf))


def _label_logit(parts: dict[int, jax.Array], label: jax.Array) -> jax.Array:
    """Returns the logit of each row's label, from parts of a tile by their first columns; 0 where no part has it."""

    def pick() -> jax.Array:
        total = jnp.zeros_like(parts[0])
        for start, part in parts.items():
            at = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=WGMMA) + start
            is_label = at == lax.broadcast_in_dim(label, part.shape, [0])
            total += ptx.where(is_label, part, jnp.zeros_like(part))
        return total.sum(axis=1)

    # Few tiles have a label of any of a warp's rows.
    is_here = (label >= 0) & (label < sum(part.shape[1] for part in parts.values()))
    return lax.cond(votes.warp_any(is_here), pick, lambda: _row_values(0.0))


def _row_values(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)


def _store(cta: _Cta, row: jax.Array, first: jax.Array, weights: jax.Array, z: jax.Array) -> None:
    """Issues the copy of a part's weights, times the soft cap's slope, to the columns from `first` on.

    Nothing is stored past the last column.
    """
    problem, refs = cta.problem, cta.refs
    if problem.soft_cap is not None:
        relative = z * (1.0 / problem.soft_cap)
        weights = weights * (1.0 - relative * relative)
    slot = lax.rem(lax.div(first, _PART), _STORES)
    stage = refs.weights_smem.at[lax.axis_index("warpgroup"), slot]
    plgpu.wait_smem_to_gmem(_STORES - 1, wait_read_only=True)
    stage[...] = weights.astype(problem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, refs.weights.at[cta.tokens(row), pl.ds(first, _PART)])


def _merge(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the states of two tiles of the same rows together."""
    relative = lambda state: (*state[:2], *state[3:])
    maximum, total, *rest = monoid.combine(relative(a), relative(b), exp=fast_math.exp_16bit)
    return maximum, total, a[2] + b[2], *rest


def _body(*refs: jax.Ref, names: tuple[str, ...], **static: Any) -> None:
    cta = _Cta(**static, refs=SimpleNamespace(**dict(zip(names, refs, strict=True))))
    problem, config, shape = cta.problem, cta.config, cta.shape
    groups = lax.div(shape[0] * shape[1] - lax.axis_index("cta") + cta.ctas - 1, cta.ctas)
    if problem.weights == "tiles":
        groups = ptx.where(cta.refs.needed[0] != 0, groups, 0)
    total = groups * (config.group * cta.steps)
    stages = LeaderStages(config.stages, cta.refs.full, cta.refs.empty, total, functools.partial(_fill, cta))
    stages.start()

    @pl.loop(0, groups)
    def _(group):
        row, column = cta.group_coord(group)

        def tile(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def multiply(acc: jax.Ref) -> jax.Array:
                first, warpgroup = (group * config.group + i) * cta.steps, lax.axis_index("warpgroup")
                pl.loop(0, cta.steps)(lambda k: _compute(cta, stages, warpgroup, first + k, acc))
                plgpu.wgmma_wait(0)
                return acc[...]

            accumulator = plgpu.ACC((ROWS, config.columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            x = pl.run_scoped(multiply, accumulator)
            return _merge(state, _finish(cta, row, column * config.group + i, x))

        empty = _row_values(-jnp.inf), *(_row_values(0.0) for _ in range(num_values(problem) - 1))
        for i, value in enumerate(lax.fori_loop(0, config.group, tile, empty)):
            cta.refs.states.at[i, column, cta.tokens(row)][...] = value

    if problem.weights:
        plgpu.wait_smem_to_gmem(0)


class Results(NamedTuple):
    """Each row's maximum, or its given number, sum, label's logit and, for the entropy, sum of `exp(z - max) * z`.

    `weights [tokens, vocabulary]`: `exp(z - m)` in the operands' dtype, times the slope of the soft cap, where m is the
    row's given number, or its maximum in a tile of `config.columns` columns, in `maxima [tiles, tokens]`. There the
    tokens are padded to whole tiles, and the vocabulary to `padded_vocabulary`.
    """

    max: jax.Array
    sum: jax.Array
    label: jax.Array
    entropy_sum: jax.Array | None = None
    weights: jax.Array | None = None
    maxima: jax.Array | None = None


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def launch(
    problem: Problem,
    config: Config,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    references: jax.Array | None = None,
    needed: jax.Array | None = None,
    place: jax.Array | None = None,
) -> Results:
    """Runs the kernel; with weights of rows relative to `references`.

    With those of tiles it does nothing where `needed` is 0, and stores the weights in the `place` of an array.
    """
    missing = -problem.tokens % config.tokens
    arrays = {"hidden": hidden, "weight": weight, "labels": labels}
    if problem.weights == "rows":
        assert references is not None
        arrays["references"] = references
    if missing:
        by_token = {name: x for name, x in arrays.items() if name != "weight"}
        arrays |= {name: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in by_token.items()}
    tokens = problem.tokens + missing
    shape = tokens // config.tokens, -(-problem.vocabulary // (config.group * config.columns))
    ctas = min(hardware.current().sm_count, shape[0] * shape[1])
    memory = _scratch(problem, config)
    results = {"states": jax.ShapeDtypeStruct((num_values(problem), shape[1], tokens), jnp.float32)}
    weights = jax.ShapeDtypeStruct((tokens, problem.padded_vocabulary), problem.dtype)
    written: dict[str, jax.Array] = {}
    if problem.weights == "rows":
        results["weights"] = weights
    elif problem.weights == "tiles":
        arrays["needed"] = jnp.ones(1, jnp.int32) if needed is None else needed.astype(jnp.int32).reshape(1)
        written["weights"] = lax.empty(weights.shape, weights.dtype) if place is None else place
        results["maxima"] = jax.ShapeDtypeStruct((shape[1] * config.group, tokens), jnp.float32)
    names = *arrays, *written, *results, *memory
    kernel = plgpu.kernel(
        functools.partial(_body, names=names, problem=problem, config=config, shape=shape, ctas=ctas),
        out_type=tuple(results.values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=list(memory.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="linear_cross_entropy",
    )
    operands = tuple(arrays.values())
    if written:
        outs, of_workspace = reduce.with_workspace(kernel, operands, tuple(written.values()), tuple(results.values()))
    else:
        outs, of_workspace = kernel(*operands), []
    arrays = dict(zip((*results, *written), (*outs, *of_workspace), strict=True))
    maximum, total, label, *rest = arrays.pop("states")[:, :, : problem.tokens]
    maximum, total, *rest = monoid.merge_over((maximum, total, *rest), 0)
    return Results(maximum, total, label.sum(0), *rest, **arrays)
