"""The kernel of the states of `hidden @ weight`: in the interpreter against float64, and compiled for an H200."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret

import jaxsoftmax
from jaxsoftmax._core.sharding import AxisSharding
from jaxsoftmax._cross_entropy import chunks, linear_kernel
from pallas_kernels import hardware
from pallas_kernels.hardware import H200
from pallas_kernels.linear_cross_entropy import dispatch, forward, gradient
from pallas_kernels.linear_cross_entropy.forward import Config, Problem
from pallas_kernels.monoid import Stats
from pallas_kernels.softmax.problem import IGNORED

BF16, F16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
CASES = {
    "plain": Problem(128, 64, 256, BF16),
    "several tiles of tokens": Problem(384, 192, 512, BF16, scale=0.5),
    "several groups": Problem(128, 64, 2304, BF16, entropy=True),
    "weights of tiles": Problem(200, 128, 1344, BF16, scale=0.5, weights="tiles"),
    "weights of rows": Problem(200, 128, 1344, BF16, scale=0.5, weights="rows"),
    "weights of rows, soft cap": Problem(130, 64, 264, BF16, transposed=True, soft_cap=5.0, weights="rows"),
    "weights, soft cap": Problem(256, 64, 264, F16, transposed=True, soft_cap=5.0, weights="tiles"),
    "soft cap": Problem(128, 128, 512, F16, scale=2.0, soft_cap=5.0, entropy=True),
    "columns that do not divide": Problem(256, 64, 704, BF16, entropy=True),
    "tokens that do not divide": Problem(130, 320, 256, BF16, entropy=True),
    "transposed": Problem(128, 128, 520, BF16, transposed=True),
}


def operands(problem: Problem) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(problem.vocabulary)
    hidden = jnp.asarray(rng.normal(size=(problem.tokens, problem.embedding)), problem.dtype)
    weight = jnp.asarray(rng.normal(size=(problem.embedding, problem.vocabulary)), problem.dtype)
    labels = rng.integers(0, problem.vocabulary, problem.tokens)
    # A label in the first and in the last column, and three that no column has.
    labels[:5] = 0, problem.vocabulary - 1, problem.vocabulary, problem.vocabulary + 1000, -1
    return hidden, weight.T if problem.transposed else weight, jnp.asarray(labels, jnp.int32)


def check(
    problem: Problem, config: Config, ctas: int, monkeypatch: pytest.MonkeyPatch, labels: np.ndarray | None = None
) -> None:
    """Few CTAs, so that each has several tiles."""
    device = functools.partial(hardware.Device, **{**vars(H200), "sm_count": ctas})
    monkeypatch.setattr(hardware, "current", device)
    jax.clear_caches()
    compare(problem, functools.partial(_interpreted, functools.partial(forward.launch, problem, config)), labels)


def _interpreted(run: Callable[..., Any], *arrays: jax.Array, references: jax.Array | None) -> Any:
    return interpret(lambda given: run(*given[0], references=given[1]), (arrays, references))


def compare(problem: Problem, run: Callable[..., Any], labels: np.ndarray | None = None) -> None:
    """What a kernel gives, against NumPy in float64."""
    hidden, weight, given = operands(problem)
    labels = given if labels is None else jnp.asarray(labels, jnp.int32)
    references = 3 * jnp.cos(jnp.arange(1.0 * problem.tokens)) if problem.weights == "rows" else None
    got = run(hidden, weight, labels, references=references)
    wide = lambda x: np.asarray(x).astype(np.float64)
    z = problem.scale * (wide(hidden) @ (wide(weight).T if problem.transposed else wide(weight)))
    z = z if problem.soft_cap is None else problem.soft_cap * np.tanh(z / problem.soft_cap)
    maximum, total, label, entropy_sum, stored, maxima = (x if x is None else wide(x) for x in got)
    if problem.weights:
        if references is not None:
            np.testing.assert_array_equal(maximum, np.asarray(references))
            maxima = np.pad(maximum, (0, len(stored) - problem.tokens))[None].repeat(-(-problem.vocabulary // 256), 0)
            maximum, total = z.max(1), total * np.exp(maximum - z.max(1))
        slope = 1 if problem.soft_cap is None else 1 - np.square(z / problem.soft_cap)
        own = lambda x: x[: problem.tokens, : problem.vocabulary]
        relative = own(stored) * np.exp(own(np.repeat(maxima.T, Config().columns, 1)) - maximum[:, None])
        np.testing.assert_allclose(relative, np.exp(z - z.max(1, keepdims=True)) * slope, rtol=6e-3, atol=1e-6)
    np.testing.assert_allclose(maximum, z.max(1), rtol=1e-5)
    weights = np.exp(z - z.max(1, keepdims=True))
    np.testing.assert_allclose(total, weights.sum(1), rtol=1e-4)
    is_label = np.arange(problem.vocabulary) == np.asarray(labels)[:, None]
    np.testing.assert_allclose(label, np.where(is_label, z, 0).sum(1), rtol=1e-4, atol=1e-4)
    assert (entropy_sum is not None) == problem.entropy
    if entropy_sum is not None:
        np.testing.assert_allclose(entropy_sum / total, (weights * z).sum(1) / weights.sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CASES[name], Config(), 2, monkeypatch)


@pytest.mark.parametrize(
    "config",
    [Config(stages=2, band=1, group=1), Config(stages=3, band=2, group=2), Config(columns=128, group=3)],
    ids=str,
)
def test_configs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CASES["several tiles of tokens"], config, 3, monkeypatch)


def test_a_label_that_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every column of a tile. Of 64 rows, whose warps look for labels together here, one has a label in the tile."""
    problem, column = Problem(5504, 64, 768, BF16), np.arange(Config().columns)
    tile, labels = column % 3, np.full(problem.tokens, -1)
    labels[64 * (column // 3) + (column + 21 * tile) % 64] = tile * Config().columns + column
    assert np.unique(labels[labels >= 0] % Config().columns).size == Config().columns
    check(problem, Config(), 2, monkeypatch, labels)


def compare_gradient(needed: bool, run: Callable[..., Any]) -> None:
    """The gradient in the place of weights, one of which is NaN in a row with a factor of 0, against NumPy."""
    rng, (tokens, vocabulary, columns) = np.random.default_rng(0), (128, 576, 256)
    weights, factors = rng.random((tokens, vocabulary), np.float32), rng.random((3, tokens), np.float32)
    weights[5, 7], factors[:, 5] = np.nan, 0
    labels, of_labels = rng.integers(-1, vocabulary, tokens).astype(np.int32), rng.random(tokens, np.float32)
    stored = jnp.asarray(weights, BF16)
    got = run(jnp.asarray(needed), stored, *map(jnp.asarray, (factors, of_labels, labels)))
    wide = np.asarray(stored).astype(np.float32)
    by_column = factors.T.repeat(columns, 1)[:, :vocabulary]
    want = np.where(by_column == 0, 0, wide * by_column)
    want -= np.where(np.arange(vocabulary) == labels[:, None], of_labels[:, None], 0)
    np.testing.assert_allclose(np.asarray(got).astype(np.float32), want if needed else wide, rtol=5e-3, atol=5e-3)


in_place = functools.partial(gradient.run, columns=256)


@pytest.mark.parametrize("needed", [True, False])
def test_gradient_in_the_place_of_weights(needed: bool) -> None:
    compare_gradient(needed, functools.partial(interpret, in_place))


ON_GPU = (
    Problem(1000, 512, 2112, BF16, scale=0.1, entropy=True),
    Problem(4096, 1024, 32000, BF16, scale=0.1),
    Problem(2048, 256, 50264, F16, transposed=True, scale=0.3, soft_cap=5.0, entropy=True),
    Problem(129, 4096, 8192, BF16, transposed=True, scale=0.05, entropy=True),
    Problem(1000, 512, 8256, BF16, scale=0.3, soft_cap=5.0, weights="tiles"),
    Problem(1000, 512, 8256, BF16, scale=0.1, weights="rows"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [*CASES.values(), *ON_GPU], ids=str)
@pytest.mark.parametrize("config", [Config(), Config(stages=3, band=3)], ids=str)
def test_on_a_gpu(problem: Problem, config: Config) -> None:
    for _ in range(3):
        compare(problem, functools.partial(forward.launch, problem, config))


@pytest.mark.gpu
@pytest.mark.parametrize("needed", [True, False])
def test_gradient_in_the_place_of_weights_on_a_gpu(needed: bool) -> None:
    compare_gradient(needed, in_place)


@pytest.mark.parametrize(
    "problem, words",
    [
        (Problem(8, 64, 256, jnp.dtype(jnp.float32)), "16-bit floats"),
        (Problem(8, 60, 256, BF16), "multiple of 64"),
        (Problem(8, 64, 248, BF16), "256 columns or more"),
        (Problem(8, 64, 50264, BF16), "multiple of 64"),
        (Problem(8, 64, 50257, BF16, transposed=True), "multiple of 8"),
        (Problem(0, 64, 256, BF16), "no tokens"),
        (Problem(8, 64, 256, BF16, scale=-1.0), "positive number"),
    ],
)
def test_what_the_kernel_declines(problem: Problem, words: str) -> None:
    assert words in str(forward.unsupported(problem, H200))


@pytest.mark.aot
@pytest.mark.parametrize("problem", [
    Problem(8192, 4096, 128256, BF16),
    Problem(8192, 4096, 151936, BF16, soft_cap=30.0, entropy=True),
    Problem(1000, 1024, 8200, BF16, transposed=True),
    Problem(4096, 4096, 128256, BF16, weights="rows"),
    Problem(4096, 2560, 151936, F16, soft_cap=30.0, weights="tiles", transposed=True),
    Problem(8192, 4096, 128256, F16, entropy=True, transposed=True),
], ids=str)  # fmt: skip
def test_compiles_without_spills(problem: Problem) -> None:
    matrix = (problem.vocabulary, problem.embedding)
    shapes = (problem.tokens, problem.embedding), matrix if problem.transposed else matrix[::-1]
    factors = [jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes]
    labels = jax.ShapeDtypeStruct((problem.tokens,), jnp.int32)
    run = lambda hidden, weight, labels: forward.launch(
        problem, Config(), hidden, weight, labels, references=1.0 * labels
    )
    _check_compiled(run, *factors, labels)


def _check_compiled(run: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> None:
    (report,) = aot.compile_for_h200(run, *shapes)
    for each in (report, report.relocatable):
        assert each.spill_bytes == 0, each
        assert not [line for line in each.complaints if "serializ" in line], each
    assert not report.shares_scratch


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_gradient_compiles_without_spills(dtype: jnp.dtype) -> None:
    shapes = (1,), (4096, 151936), (594, 4096), (4096,), (4096,)
    types = jnp.int32, dtype, jnp.float32, jnp.float32, jnp.int32
    run = functools.partial(gradient.run, columns=Config().columns)
    _check_compiled(run, *(jax.ShapeDtypeStruct(*each) for each in zip(shapes, types, strict=True)))


RULES = {
    "loss": chunks.Rules(),
    "entropy": chunks.Rules(results=("loss", "lse", "entropy"), all_rows=True, soft_cap=5.0, scale=0.5, z_loss=0.1),
    "transposed": chunks.Rules(transposed=True, results=("loss", "entropy"), all_rows=True),
}


def by_the_kernel(call: Callable[..., Any], otherwise: str) -> Any:
    """What a call gives by the kernel; without it, it fails for want of the function `otherwise`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, otherwise, None)
        jax.clear_caches()
        return interpret(functools.partial(call, may_run_kernel=True))


@pytest.mark.parametrize("name", RULES)
def test_losses_are_those_of_chunks(name: str) -> None:
    """Of ignored tokens, and of labels that another device has, too."""
    rules = RULES[name]
    hidden, weight, labels = operands(Problem(130, 64, 320, BF16, transposed=rules.transposed))
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    losses = functools.partial(chunks.forward, rules, chunks.Parts((), AxisSharding((), 320)), given)
    want = losses()
    got = by_the_kernel(losses, "_over_chunks")
    assert got.keys() == want.keys()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


# Rules of a call and its operands beside hidden states, weight and labels, and why no kernel takes them.
REASONS: list[tuple[dict[str, Any], tuple[str, ...], bool, str | None]] = [
    ({}, (), False, None),
    ({"results": ("loss", "lse", "entropy"), "z_loss": 0.1, "soft_cap": 5.0}, (), False, None),
    ({"implementation": "xla"}, (), False, "implementation='xla'"),
    ({"chunk_size": 50}, (), False, "chunk_size is given"),
    ({"chunk_size": 50}, ("cotangent_loss", "cotangent_lse"), True, None),
    ({}, ("bias",), False, "the kernel takes no bias"),
    ({}, ("where",), False, "the kernel takes no mask"),
    ({}, ("scale",), False, "the kernel takes a scale that is a positive number"),
    ({}, ("cap",), False, "the kernel takes a soft cap that is a constant"),
    ({"smoothing": 0.1}, (), False, "the kernel does not smooth labels"),
    ({"precision": "highest"}, (), False, "the kernel has no precision to choose"),
    ({"results": ("loss", "entropy")}, ("cotangent_loss", "cotangent_entropy"), True, "the gradient of entropies"),
]


@pytest.mark.parametrize("facts, names, for_gradient, words", REASONS, ids=str)
def test_why_no_kernel_takes_a_loss(
    facts: dict[str, Any], names: tuple[str, ...], for_gradient: bool, words: str | None
) -> None:
    shapes = {"hidden": (130, 64), "weight": (64, 320), "bias": (320,), "where": (130, 320)}
    given = {name: jax.ShapeDtypeStruct(shapes.get(name, (130,)), BF16) for name in ("hidden", "weight", *names)}
    decision = linear_kernel.decide(chunks.Rules(**facts), given, H200, for_gradient=for_gradient)
    reason = next((why for _, why in decision.declined), None)
    assert (decision.kernel is None) == (reason is not None)
    assert (reason is None) == (words is None), reason
    assert str(reason).startswith(str(words))


@pytest.mark.parametrize(
    "tokens, embedding, vocabulary, group, by_xla",
    [
        (1490, 3072, 1024, 1, True),
        (384, 2048, 4096, 1, True),
        (673, 1216, 2048, 1, False),
        (86, 1024, 65536, 2, False),
        (256, 1024, 49152, 1, False),
        (8192, 2048, 50304, 4, False),
        (1, 4096, 32000, 1, False),
    ],
)
def test_tiles_keep_sms_busy_or_xla_multiplies(
    tokens: int, embedding: int, vocabulary: int, group: int, by_xla: bool
) -> None:
    problem = Problem(tokens, embedding, vocabulary, BF16)
    assert dispatch.config(problem, H200).group == group
    assert (dispatch.decide(problem, H200).kernel is None) == by_xla
    assert dispatch.decide(problem, H200, named=True).config.group == group


# By what a gradient of bfloat16 is computed: weights of rows, these and the second kernel, or weights of tiles.
WAYS: dict[str, dict[str, float]] = {"rows": {}, "rows, in place": {"_MOST": -1.0}, "tiles": {"_REACH": -1.0}}


@pytest.mark.parametrize(
    "gives_loss, dtype, way",
    [*itertools.product([True, False], [BF16], WAYS), *itertools.product([True, False], [F16], ["rows"])],
    ids=str,
)
def test_gradients_are_those_of_chunks(gives_loss: bool, dtype: jnp.dtype, way: str) -> None:
    """Of float32 logits, of three chunks with a tail."""
    rules = chunks.Rules(transposed=True, soft_cap=5.0, scale=0.5, z_loss=0.1, chunk_size=50, all_rows=not gives_loss)
    rules = dataclasses.replace(rules, results=("loss",) if gives_loss else ("loss", "lse"))
    hidden, weight, labels = operands(Problem(130, 64, 328, dtype, transposed=True))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(linear_kernel, name, value)
        check_gradients(rules, hidden, weight, labels.at[7].set(IGNORED), gives_loss=gives_loss)


def check_gradients(rules: Any, hidden: jax.Array, weight: jax.Array, labels: jax.Array, *, gives_loss: bool) -> None:
    parts, of_tokens = chunks.Parts((), AxisSharding((), len(weight))), jnp.cos(jnp.arange(1.0 * len(labels)))
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    if gives_loss:
        given["weights"] = of_tokens
    else:
        found = chunks.forward(rules, parts, given)
        given |= {name: found[name] for name in ("max", "sum")} | {
            "cotangent_loss": of_tokens,
            "cotangent_lse": of_tokens,
        }
    call = functools.partial(chunks.gradient, rules, parts, given, moving=("hidden", "weight"), gives_loss=gives_loss)
    want = call()
    got = by_the_kernel(call, "_raw")
    assert got.keys() == want.keys()
    if gives_loss:
        for found in (want, got):
            found["lse"] = found.pop("max") + jnp.log(found.pop("sum"))
    for name, x in want.items():
        largest = np.abs(np.float32(x)).max()
        np.testing.assert_allclose(np.float32(got[name]), np.float32(x), rtol=1e-2, atol=1e-2 * largest, err_msg=name)


@pytest.mark.parametrize("far", [0, 3], ids=["nan in an ignored token", "far from its estimate"])
def test_rows_that_the_kernel_computes_again(far: int) -> None:
    hidden, weight, labels = operands(Problem(130, 64, 328, BF16, transposed=True))
    hidden = hidden.at[3].multiply(100) if far else hidden.at[7, 0].set(jnp.nan)
    check_gradients(chunks.Rules(transposed=True), hidden, weight, labels.at[7].set(IGNORED), gives_loss=True)


@pytest.mark.parametrize("cancelling, rtol", [(0, 1e-4), (1, 1e-2)], ids=["", "cotangents that cancel"])
def test_the_labels_part_of_the_gradient_is_not_rounded(cancelling: int, rtol: float) -> None:
    """A row's factor makes up for the 16 bits of its label's weight, but where `loss - lse` leaves the label alone."""
    rng, rows = np.random.default_rng(0), np.arange(64)
    z, estimate = 3 * rng.normal(size=(64, 256)), rng.normal(size=64)
    prob_factor, label_factor, local = rng.random(64), rng.random(64), rng.integers(0, 256, 64)
    prob_factor[:cancelling] = 0
    stored = jnp.asarray(np.exp(z - estimate[:, None]), BF16)
    numbers = (np.broadcast_to(estimate, (1, 64)), z[rows, local], z.max(1), np.exp(z - z.max(1)[:, None]).sum(1))
    relative_to, label, largest, total = (jnp.asarray(x, jnp.float32) for x in numbers)
    weights = linear_kernel.Weights(stored, relative_to, jnp.bool_(True), label)
    given = (
        *(jnp.asarray(x, jnp.float32) for x in (prob_factor, label_factor)),
        jnp.asarray(local, jnp.int32),
        jnp.ones(64, bool),
    )
    call = functools.partial(linear_kernel.slopes, chunks.Rules(), weights, Stats(largest, total))
    got, factor = interpret(call, *given)
    p = np.exp(z - z.max(1)[:, None]) / np.exp(z - z.max(1)[:, None]).sum(1)[:, None]
    of_label = np.asarray(got)[rows, local].astype(np.float64) * np.asarray(factor)
    np.testing.assert_allclose(of_label, prob_factor * p[rows, local] - label_factor, rtol=rtol, atol=1e-6)


@pytest.mark.aot
@pytest.mark.parametrize("layout", ["EV", "VE"])
def test_losses_on_a_gpu_need_no_memory(layout: str) -> None:
    matrix = (4096, 128256) if layout == "EV" else (128256, 4096)
    shapes = [((8192, 4096), BF16), (matrix, BF16), ((8192,), jnp.dtype(jnp.int32))]
    given = aot.on_h200([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    call = functools.partial(jaxsoftmax.linear_cross_entropy, weight_layout=layout)
    compiled = jax.jit(call).lower(*given).compile()
    assert "linear_cross_entropy" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 2**20


@pytest.mark.aot
def test_gradients_of_a_vocabulary_of_no_whole_tiles_compile() -> None:
    shapes = [((512, 256), BF16), ((8200, 256), BF16), ((512,), jnp.dtype(jnp.int32))]
    given = aot.on_h200([jax.ShapeDtypeStruct(*shape) for shape in shapes])

    def mean(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return jaxsoftmax.linear_cross_entropy(hidden, weight, labels, weight_layout="VE").mean()

    program = jax.jit(jax.grad(mean, (0, 1))).lower(*given).compile().as_text()
    assert "linear_cross_entropy_gradient" in program
