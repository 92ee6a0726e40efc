"""Error texts: what was got, what was wanted, what to do."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

X = np.zeros((2, 3), np.float32)
CALLS: dict[str, Any] = {
    "softmax": jaxsoftmax.softmax,
    "log_softmax": jaxsoftmax.log_softmax,
    "logsumexp": jaxsoftmax.logsumexp,
    "top_k_softmax": lambda x, **arguments: jaxsoftmax.top_k_softmax(x, 2, **arguments),
    "softmax_cross_entropy": lambda x, **arguments: jaxsoftmax.softmax_cross_entropy(x, x, **arguments),
    "softmax_cross_entropy_with_integer_labels": lambda x, **arguments: (
        jaxsoftmax.softmax_cross_entropy_with_integer_labels(x, np.array([0, 1]), **arguments)
    ),
    "flash_attention": lambda x, **arguments: jaxsoftmax.flash_attention(*[x[:, None, None]] * 3, **arguments),
}


@pytest.mark.parametrize(
    "error, text, arguments",
    [
        (TypeError, "x has dtype key<fry>, expected numbers. A random key draws numbers", {"x": jax.random.key(0)}),
        (TypeError, "x is of type NoneType and makes no array of numbers, expected an array", {"x": None}),
        (TypeError, "x is of type list and makes no array of numbers", {"x": [[1.0, 2.0], [3.0]]}),
        (TypeError, "x is of type int and makes no array of numbers, expected an array, a number that", {"x": 10**400}),
        (TypeError, "where is of type str and makes no array of numbers", {"where": "mask"}),
        (ValueError, "axis 2 is out of bounds for x of rank 2, expected -2 <= axis < 2", {"axis": 2}),
        (ValueError, "axis -3 is out of bounds", {"axis": (0, -3)}),
        (ValueError, "axis -1 is out of bounds for x of rank 0, expected 0 <= axis < 0. Pass axis=None", {"x": 1.0}),
        (ValueError, "duplicate value in axis=(0, -2), expected each axis once", {"axis": (0, -2)}),
        (TypeError, "where has dtype float32, expected bool. Pass where.astype(bool)", {"where": X}),
        (
            ValueError,
            "where has shape (3, 3), expected a shape that broadcasts with x's, (2, 3)",
            {"where": np.ones((3, 3), bool)},
        ),
        (TypeError, "axis is 1.5, expected an integer, several, or None. If it is traced", {"axis": 1.5}),
        (TypeError, "axis is (0, None), expected an integer", {"axis": (0, None)}),
        (ValueError, "scale has shape (2,), expected a shape that broadcasts to x's, (2, 3)", {"scale": np.ones(2)}),
        (ValueError, "scale is nan, expected a number", {"scale": float("nan")}),
        (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": np.ones((1, 1), np.complex64)}),
        (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": np.complex64(1j)}),
        (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": 1j, "x": X.astype(np.complex64)}),
        (TypeError, "scale is of type str and makes no array of numbers", {"scale": "2"}),
        (ValueError, "scale is an integer beyond 2e+308, expected a number that a float holds", {"scale": -(10**400)}),
        (ValueError, "implementation='cudnn', expected one of None (the fastest there is), 'xla', 'mosaic_gpu'. "
         "Pass None: it takes a Mosaic GPU kernel where there is one", {"implementation": "cudnn"}),
        (ValueError, "implementation=['xla'], expected one of None", {"implementation": ["xla"]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_arguments(op: str, error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match="^" + op + ": .*" + re.escape(text)):
        getattr(jaxsoftmax, op)(**{"x": X, **arguments})


def test_logsumexp() -> None:
    for name in ("a", "b"):
        with pytest.raises(TypeError, match=f"logsumexp: {name} is of type str and makes no array of numbers"):
            jaxsoftmax.logsumexp(**{"a": X, name: "numbers"})
        with pytest.raises(TypeError, match=f"logsumexp: {name} has dtype key<fry>, expected numbers"):
            jaxsoftmax.logsumexp(**{"a": X, name: jax.random.key(0)})
    with pytest.raises(
        ValueError, match=re.escape("b has shape (4,), expected a shape that broadcasts with a's, (2, 3)")
    ):
        jaxsoftmax.logsumexp(X, b=np.ones(4))
    with pytest.raises(TypeError, match=r"logsumexp: axis is JitTracer.* static argument of jax\.jit"):
        jax.jit(jaxsoftmax.logsumexp)(X, 1)
    with pytest.raises(NotImplementedError, match="the kernels take no weights b"):
        jaxsoftmax.logsumexp(X, b=X, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="logsumexp: axis 5 is out of bounds for a of rank 2"):
        jaxsoftmax.logsumexp(X, axis=5)
    with pytest.raises(ValueError, match="merge: got no states"):
        jaxsoftmax.merge()
    state = jaxsoftmax.Stats(X, X)
    for wrong in ([state, state], (state, state), (X, X, X), X):
        with pytest.raises(TypeError, match=rf"merge: got a {type(wrong).__name__}, .* Pass .* as merge\(\*states\)"):
            jaxsoftmax.merge(wrong)
    with pytest.raises(TypeError, match="merge: sum has dtype complex64, expected a real dtype"):
        jaxsoftmax.merge(state, (X, 1j * X))
    with pytest.raises(
        ValueError, match=r"merge: .* have the shapes \(2, 3\), \(2, 3\), \(2,\), \(2,\), expected shapes"
    ):
        jaxsoftmax.merge(state, (X[:, 0], X[:, 0]))


@pytest.mark.parametrize("op, name", [("softmax", "x"), ("log_softmax", "x"), ("logsumexp", "a")])
def test_no_kernel_takes_complex_numbers(op: str, name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=f"^{op}: implementation='mosaic_gpu' .* {name} is complex; pass impl"
    ):
        getattr(jaxsoftmax, op)(X.astype(np.complex64), implementation="mosaic_gpu")


def test_lists_of_traced_numbers() -> None:
    @jax.jit
    def function(a: jax.Array, b: jax.Array) -> Any:
        where, scale = [a > 0, b > 5], [a, b]
        return jaxsoftmax.softmax([a, b], where=where, scale=scale), jaxsoftmax.logsumexp([[a], [b]], 0, [[b], [a]])

    np.testing.assert_allclose(function(1.0, 2.0)[0], [1, 0])
    np.testing.assert_allclose(function(1.0, 2.0)[1], [np.log(2 * np.e + np.e**2)], rtol=1e-6)


@pytest.mark.parametrize(
    "error, text, arguments",
    [
        (TypeError, "logits has dtype complex64, expected a real dtype", {"logits": np.zeros((2, 3), np.complex64)}),
        (ValueError, "axis 2 is out of bounds for logits of rank 2", {"axis": 2}),
        (ValueError, "duplicate value in axis=(1, -1)", {"axis": (1, -1)}),
        (TypeError, "labels has dtype float32, expected integers. Pass labels.astype(int), or", {"labels": X[:, 0]}),
        (TypeError, "labels has dtype bool, expected integers", {"labels": X[:, 0] > 0}),
        (ValueError, "labels has shape (2, 1), expected that of the logits without axis, (2,)", {"labels": [[0], [1]]}),
        (ValueError, "labels has shape (2,), expected that of the logits without axis, (3,)", {"axis": 0}),
        (ValueError, "labels has 3 at (1,), expected 0 <= label < 3", {"labels": [0, 3]}),
        (ValueError, "labels has -1 at (0,), expected 0 <= label < 3", {"labels": [-1, 0]}),
        (TypeError, "where has dtype float32, expected bool", {"where": X}),
        (ValueError, "where has shape (3,), expected a shape that broadcasts with the", {"where": np.ones(3, bool)}),
        (ValueError, "where has shape (), expected the rank of the logits, 2, or of the rows, 1", {"where": True}),
        (ValueError, "label_smoothing is 1.5, expected a finite number from 0.0 to 1.0", {"label_smoothing": 1.5}),
        (ValueError, "label_smoothing is nan", {"label_smoothing": float("nan")}),
        (TypeError, "label_smoothing is 1j, expected a Python number, and a real", {"label_smoothing": 1j}),
        (TypeError, "z_loss is np.complex64(1+2j), expected a Python number", {"z_loss": np.complex64(1 + 2j)}),
        (TypeError, "logits_soft_cap is np.complex128(1+0j)", {"logits_soft_cap": np.complex128(1)}),
        (ValueError, "z_loss is an integer beyond 2e+308, expected a number that a float", {"z_loss": 10**400}),
        (TypeError, "label_smoothing is an array, float32[], expected a Python", {"label_smoothing": jnp.ones(())}),
        (TypeError, "scale has dtype complex64, expected a real dtype", {"scale": np.complex64(1j)}),
        (ValueError, "z_loss is inf, expected a finite number", {"z_loss": float("inf")}),
        (ValueError, "logits_soft_cap is 0, expected a positive number. Pass None", {"logits_soft_cap": 0}),
        (ValueError, "logits_soft_cap is -1.0, expected a finite number from 0.0", {"logits_soft_cap": -1.0}),
        (TypeError, "logits_soft_cap is '30', expected a Python number", {"logits_soft_cap": "30"}),
        (ValueError, "scale has shape (2,), expected a shape that broadcasts to the logits'", {"scale": np.ones(2)}),
        (TypeError, "ignore_index is 1.0, expected a Python integer or None", {"ignore_index": 1.0}),
        (ValueError, "weights has shape (3,), expected a shape that broadcasts to the rows', (2,)", {"weights": X[0]}),
        (TypeError, "weights has dtype complex64", {"weights": np.ones((), np.complex64)}),
        (ValueError, "implementation='cuda', expected one of None", {"implementation": "cuda"}),
    ],
)  # fmt: skip
def test_cross_entropy(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    name = "softmax_cross_entropy_with_integer_labels"
    with pytest.raises(error, match="^" + name + ": " + re.escape(text)):
        getattr(jaxsoftmax, name)(**{"logits": X, "labels": np.array([0, 1]), **arguments})


def test_cross_entropy_of_probabilities() -> None:
    with pytest.raises(
        ValueError, match=re.escape("labels has shape (2,), expected a shape that broadcasts with the log")
    ):
        jaxsoftmax.softmax_cross_entropy(X, np.ones(2))
    with pytest.raises(TypeError, match="softmax_cross_entropy: labels has dtype complex64"):
        jaxsoftmax.softmax_cross_entropy(X, np.zeros((2, 3), np.complex64))
    with pytest.raises(ValueError, match=re.escape("where has shape (3,), expected a shape that broadcasts with")):
        jaxsoftmax.softmax_cross_entropy(X, X, where=np.ones(3, bool))


def test_a_named_kernel_never_falls_back(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: problem.cols > 3
    with pytest.raises(
        NotImplementedError, match=r"no kernel takes this call:\n  first: it is not for this\n  second: it"
    ):
        jaxsoftmax.softmax(X, implementation="mosaic_gpu")
    np.testing.assert_allclose(jaxsoftmax.softmax(X), jax.nn.softmax(X))
    np.testing.assert_allclose(jaxsoftmax.softmax(X, None, implementation="mosaic_gpu"), jax.nn.softmax(X, None))
    with pytest.raises(NotImplementedError, match="symbolic or zero"):
        jaxsoftmax.softmax(jnp.zeros((0, 9)), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "function", [jax.jit(lambda f, x: f(x), static_argnums=0), lambda f, x: f(x)], ids=["jit", "eager"]
)
def test_a_named_kernel_on_another_platform(function: Any) -> None:
    for op in CALLS.values():
        with pytest.raises(NotImplementedError, match="lowered for a platform other than cuda"):
            function(lambda x, op=op: op(x, implementation="mosaic_gpu"), X)
    jax.make_jaxpr(lambda x: jaxsoftmax.softmax(x, implementation="mosaic_gpu"))(X)


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_kernel_is_an_error_of_the_function_that_was_called(stand_ins: Any, name: str) -> None:
    named = functools.partial(CALLS[name], implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=f"^{name}: implementation='mosaic_gpu' was asked for, but this comp"):
        jax.jit(named).trace(X).lower(lowering_platforms=("tpu",))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), named(X), CALLS[name](X))
    stand_ins.accepts = lambda _: False
    with pytest.raises(NotImplementedError, match=f"^{name}: implementation='mosaic_gpu' was asked for, but no kernel"):
        named(X[:, :2])


def test_a_missing_kernel_of_a_derivative(stand_ins: Any) -> None:
    stand_ins.accepts = lambda problem: not problem.op.is_linear
    for name in ("softmax", "log_softmax"):
        with pytest.raises(NotImplementedError, match=f"^the derivative of {name}: implementation='mosaic_gpu' was"):
            jax.grad(lambda x, name=name: CALLS[name](x, implementation="mosaic_gpu")[0, 0])(X)


def test_explain_names_its_ops() -> None:
    with pytest.raises(ValueError, match=r"explain: op='argmax', expected one of softmax, softmax_vjp"):
        jaxsoftmax.explain(X, op="argmax")
    with pytest.raises(ValueError, match=r"explain: op=\['softmax'\], expected one of softmax, softmax_vjp"):
        jaxsoftmax.explain(X, op=["softmax"])
    with pytest.raises(ValueError, match="softmax: axis 7 is out of bounds"):
        jaxsoftmax.explain(X, 7)
    for scale in (2.0, np.ones(3)):
        with pytest.raises(TypeError, match=r"explain: scale is .*, but logsumexp has no scale\. Multiply x by it bef"):
            jaxsoftmax.explain(X, op="logsumexp", scale=scale)
