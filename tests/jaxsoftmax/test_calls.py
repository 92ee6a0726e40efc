"""What calls of all public functions have in common: whatever is passed, errors are in the name of what was called."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._core.calls import OPERATIONS, REMARKS, WORDS
from jaxsoftmax._core.checks import is_batch_invariant

X, LABELS = np.zeros((2, 3), np.float32), np.array([0, 2])
Q, PAGES, TABLES = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 6, 8, 8), np.float32), np.array([[3, 5], [0, 2]])
QKV = {"query": Q, "key": Q, "value": Q}
LINEAR = {"hidden": X, "weight": X.T @ X, "labels": LABELS}
PAGED = {"query": Q[:, 0], "key_pages": PAGES, "value_pages": PAGES, "block_tables": TABLES, "lengths": LABELS}
USUAL: dict[str, dict[str, Any]] = {
    "batch_invariant": {},
    "logits_memory": {"most": None},
    "explain": {"x": X},
    "explain_attention": QKV,
    "explain_linear_cross_entropy": LINEAR,
    "explain_paged_attention": PAGED,
    "flash_attention": QKV,
    "install": {},
    "linear_cross_entropy": LINEAR,
    "log_normalizer": {"state": jaxsoftmax.Stats(X, X)},
    "log_softmax": {"x": X},
    "logsumexp": {"a": X},
    "merge": {},
    "merge_attention": {"outs": [Q, Q], "lses": [Q[..., 0], Q[..., 0]]},
    "paged_attention": PAGED,
    "patch": {},
    "softmax": {"x": X},
    "softmax_cross_entropy": {"logits": X, "labels": X},
    "softmax_cross_entropy_with_integer_labels": {"logits": X, "labels": LABELS},
    "top_k_softmax": {"logits": X, "k": 2},
    "uninstall": {},
    "unzigzag": {"x": X[:, :2], "axis": 1, "devices": 1},
    "zigzag": {"x": X[:, :2], "axis": 1, "devices": 1},
}
# Values that some function or other once answered in words of Python, NumPy or JAX.
WRONG: list[Any] = [
    *(None, "x", b"x", object(), len, {}, {1, 2}, [], (None,), (8, 128), [[1], [1, 2]], ["heads_first"]),
    *(0, -1, 2**70, [2**70], -1.5, float("nan"), 1j, np.int64(1), np.float32(1)),
    *(np.array(["a", "b"]), np.array([None, {}], object), np.zeros(0, np.float32), np.zeros((9,) * 5, np.float32)),
    *(jnp.array(1), jnp.zeros((2, 3), jnp.float8_e4m3fn), jax.random.key(0)),
]  # fmt: skip
EXPLAINED = {"explain": jaxsoftmax.softmax, "explain_attention": jaxsoftmax.flash_attention,
             "explain_linear_cross_entropy": jaxsoftmax.linear_cross_entropy,
             "explain_paged_attention": jaxsoftmax.paged_attention}  # fmt: skip
FUNCTIONS = {name: getattr(jaxsoftmax, name) for name in jaxsoftmax.__all__ if name[0].islower()}


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Any:
    yield
    jaxsoftmax.uninstall()


def test_every_function_is_here() -> None:
    assert set(USUAL) == set(FUNCTIONS)


@pytest.mark.parametrize("name", USUAL)
def test_wrong_values(name: str) -> None:
    """Each is taken, or refused by the function that was called; so is a traced number."""
    function, usual = FUNCTIONS[name], USUAL[name]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for value in WRONG:
            with suppressed(name, (parameter.name, value)):
                jax.make_jaxpr(lambda p=parameter.name, value=value: shown(function(**usual | {p: value})))()
        with suppressed(name, (parameter.name, "traced")):
            jax.make_jaxpr(lambda value, p=parameter.name: shown(function(**usual | {p: value})))(1)


def shown(result: Any) -> Any:
    """What may leave a traced function."""
    return [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]


class suppressed:
    """Takes errors that begin with the function's name."""

    def __init__(self, name: str, what: Any) -> None:
        self.name, self.what = name, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        if kind is None:
            return False
        assert issubclass(kind, (TypeError, ValueError, NotImplementedError)), (self.what, error)
        assert str(error).startswith(f"{self.name}: "), (self.what, error)
        return True


@pytest.mark.parametrize("name", USUAL)
def test_unknown_keywords(name: str) -> None:
    """Every word of other libraries that the function has a parameter for leads to that parameter."""
    function, usual = FUNCTIONS[name], USUAL[name]
    known = {p for f in (function, EXPLAINED.get(name, function)) for p in inspect.signature(f).parameters}
    for advice, words in (WORDS | REMARKS).items():
        for word in words:
            if word in known:
                continue
            with pytest.raises(TypeError) as found:
                function(**usual, **{word: None})
            start = f"{name}: got an unexpected keyword argument {word!r}."
            assert str(found.value).startswith(start)
            if advice.split("=")[0].split(" ")[0] in known and not shadowed(word, advice, known):
                assert str(found.value) == f"{start} Did you mean {advice}?"
    with pytest.raises(TypeError) as found:
        function(**usual, zzz=1)
    assert str(found.value) == f"{name}: got an unexpected keyword argument 'zzz'."


def shadowed(word: str, advice: str, known: Any) -> bool:
    """Whether another advice for the same word comes before this."""
    fits = [a for a, words in WORDS.items() if word in words and re.match(r"\w+", a)[0] in known]  # type: ignore[index]
    return fits[0] != advice


@pytest.mark.parametrize(
    "name, word, hint",
    [
        ("flash_attention", "causal", "Did you mean is_causal?"),
        ("flash_attention", "window_size", "Did you mean local_window_size?"),
        ("flash_attention", "sm_scale", "Did you mean scale?"),
        ("explain_attention", "softmax_scale", "Did you mean scale?"),
        ("flash_attention", "segment_ids", "Did you mean query_segment_ids?"),
        ("paged_attention", "softcap", "Did you mean logits_soft_cap?"),
        ("paged_attention", "page_indices", "Did you mean block_tables?"),
        ("flash_attention", "attn_mask", "Did you mean mask (True where a key is seen)?"),
        ("softmax", "mask", "Did you mean where?"),
        ("flash_attention", "dropout_p", "Did you mean dropout_rate?"),
        ("explain", "temperature", "Did you mean scale=1 / temperature?"),
        ("softmax_cross_entropy", "reduction", "The result has a loss for each row: take its .mean() or .sum()."),
        ("linear_cross_entropy", "size_average", "Did you mean reduction?"),
        ("linear_cross_entropy", "lse_square_scale", "Did you mean z_loss?"),
        ("logsumexp", "dim", "Did you mean axis?"),
        ("top_k_softmax", "norm_topk_prob", 'Did you mean normalize="top_k"?'),
        ("zigzag", "num_devices", "Did you mean devices?"),
        ("softmax", "implementaton", "Did you mean implementation?"),
    ],
)
def test_what_was_meant(name: str, word: str, hint: str) -> None:
    with pytest.raises(TypeError) as found:
        FUNCTIONS[name](**USUAL[name], **{word: None})
    assert str(found.value) == f"{name}: got an unexpected keyword argument {word!r}. {hint}"


def test_each_word_leads_somewhere() -> None:
    parameters = {p for f in FUNCTIONS.values() for p in inspect.signature(f).parameters}
    assert {re.match(r"\w+", advice)[0] for advice in WORDS} <= parameters  # type: ignore[index]
    with pytest.raises(ValueError, match="Did you mean 'softmax_vjp' or 'log_softmax_vjp' or 'cross_entropy_gradient'"):
        jaxsoftmax.explain(X, op="grad")
    for name in ("explain_attention", "explain_linear_cross_entropy"):
        for word in OPERATIONS["vjp"]:
            with pytest.raises(ValueError, match=rf"^{name}: op='{word}', expected .* Did you mean 'vjp'\?$"):
                FUNCTIONS[name](**USUAL[name], op=word)


def test_flags_are_known_when_a_call_is_traced() -> None:
    for name, function in FUNCTIONS.items():
        for flag, parameter in inspect.signature(function).parameters.items():
            if type(parameter.default) is bool and flag not in ("is_causal", "enabled"):
                for value in ("no", None, 0.0, jnp.array(True)):
                    with pytest.raises(TypeError, match=f"^{name}: {flag} is .*, expected True or False"):
                        function(**USUAL[name] | {flag: value})
                for value in (np.True_, 1):
                    jax.make_jaxpr(lambda f=function, n=name, w=flag, v=value: shown(f(**USUAL[n] | {w: v})))()
    with pytest.raises(TypeError, match=r"^logsumexp: keepdims is 'yes', expected True or"):
        jaxsoftmax.logsumexp(X, 1, None, "yes")  # type: ignore[call-overload]


def test_signatures_types_and_names_stay() -> None:
    for name, function in FUNCTIONS.items():
        plain = inspect.unwrap(function)
        assert inspect.signature(function) == inspect.signature(plain)
        assert (function.__name__, function.__doc__) == (name, plain.__doc__)
    assert np.asarray(functools.partial(jax.jit, static_argnames="axis")(jaxsoftmax.softmax)(X, axis=0)).shape == (2, 3)


def test_a_context_may_be_entered_again() -> None:
    context = jaxsoftmax.batch_invariant()
    for _ in range(2):
        with context, context:
            assert is_batch_invariant()
        assert not is_batch_invariant()


def test_dtypes_without_a_common_one() -> None:
    narrow = jnp.zeros((2, 3), jnp.float8_e4m3fn)
    wide = jnp.zeros((3, 3), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"^linear_cross_entropy: got hidden float8_e4m3fn and weight bfloat16, "):
        jaxsoftmax.linear_cross_entropy(narrow, wide, LABELS)
    with pytest.raises(TypeError, match=r"^logsumexp: got a float8_e4m3fn and b bfloat16, which JAX promotes to no"):
        jaxsoftmax.logsumexp(narrow, 1, wide[:2])


def test_precision_and_chunks() -> None:
    for name in ("flash_attention", "linear_cross_entropy"):
        with pytest.raises(ValueError, match=f"^{name}: precision is 'sideways', expected None, 'default'"):
            FUNCTIONS[name](**USUAL[name], precision="sideways")
        for taken in (None, "highest", jax.lax.Precision.DEFAULT, ("high", "default")):
            jax.make_jaxpr(lambda f=FUNCTIONS[name], u=USUAL[name], p=taken: f(**u, precision=p))()
    jax.make_jaxpr(lambda: jaxsoftmax.linear_cross_entropy(**LINEAR, chunk_size=np.int64(2)))()


def test_a_scale_of_pages_multiplies_the_query() -> None:
    rng = np.random.default_rng(0)
    query, scale = rng.normal(size=(2, 4, 8)).astype(np.float32), rng.normal(size=(2, 4, 1)).astype(np.float32)
    pages = rng.normal(size=PAGES.shape).astype(np.float32)
    call = functools.partial(jaxsoftmax.paged_attention, key_pages=pages, value_pages=pages, block_tables=TABLES,
                             lengths=np.array([9, 12]))  # fmt: skip
    np.testing.assert_allclose(call(query, scale=scale), call(query * scale, scale=1.0), rtol=1e-5, atol=1e-6)


LABELS = lambda x: jnp.zeros(x.shape[:-1], jnp.int32)
OF_ROWS = {
    **{name: getattr(jaxsoftmax, name) for name in ("softmax", "log_softmax", "logsumexp")},
    "softmax along rows": lambda x: jaxsoftmax.softmax(x, axis=0),
    "integers": lambda x: jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, LABELS(x)),
    "probabilities": lambda x: jaxsoftmax.softmax_cross_entropy(x, jnp.cos(x)),
    "linear": lambda x: jaxsoftmax.linear_cross_entropy(x, jnp.ones((x.shape[-1], 64), x.dtype), LABELS(x)),
}


@pytest.mark.parametrize("cols", [16, 4096])
@pytest.mark.parametrize("name", OF_ROWS)
def test_symbolic_rows(name: str, cols: int) -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"n, {cols}"), jnp.bfloat16)
    gradient = jax.grad(lambda x: OF_ROWS[name](x).astype(jnp.float32).sum())
    for function in (OF_ROWS[name], gradient):
        assert jax.export.export(jax.jit(function), platforms=["cpu", "cuda"])(x).out_avals


def test_a_symbolic_head_dimension() -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 1, h"), np.float32)
    program = jax.export.export(jax.jit(lambda x: jaxsoftmax.flash_attention(x, x, x)))(shape)
    x = np.random.default_rng(0).normal(size=(5, 1, 8)).astype(np.float32)
    np.testing.assert_allclose(program.call(x), jaxsoftmax.flash_attention(x, x, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXPLAINED)
def test_explanations_for_a_named_card(name: str) -> None:
    for card in ("H100", "h200", "NVIDIA H100"):
        found = FUNCTIONS[name](**USUAL[name], device=card)
        assert found.device.card == card.upper().removeprefix("NVIDIA ")


def test_explanations_of_pages() -> None:
    """A kernel for up to 1024 queries of 16 bits; elsewhere XLA gathers."""
    pages, tables = jax.ShapeDtypeStruct((2, 64, 16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8), np.int32)
    explain = lambda queries, pages=pages, **more: jaxsoftmax.explain_paged_attention(
        jax.ShapeDtypeStruct((2, queries, 4, 64), pages.dtype), pages, pages, tables, tables.update(shape=(2,)), **more
    )
    assert explain(1024).kernel == "attention"
    assert not explain(1024).notes
    gathered = "XLA gathers the pages first, 131.1 kB of keys and values"
    for found in (explain(1025), explain(1, implementation="xla")):
        assert gathered in found.notes
    with jaxsoftmax.batch_invariant():
        assert gathered in explain(1).notes
    of_floats = jax.ShapeDtypeStruct(pages.shape, np.float32)
    assert explain(1, of_floats).implementation == "xla"
    assert explain(1, of_floats, implementation="mosaic_gpu").implementation == "error"
