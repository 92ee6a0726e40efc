"""`explain` says what happens."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import _explain
from jaxsoftmax._cross_entropy import chunks
from pallas_kernels.attention.problem import Op as AttentionOp
from pallas_kernels.hardware import H200
from pallas_kernels.softmax.problem import Op

A100 = dataclasses.replace(H200, name="NVIDIA A100", compute_capability="8.0")


@pytest.fixture
def explained(stand_ins: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins with what a decision has besides."""
    from pallas_kernels.softmax import dispatch

    decide = dispatch.decide
    facts = {"reason": "it is the only one", "config": "Config(rows=4)", "bytes_moved": 2_000_000}

    def with_facts(problem: Any, device: Any, **how: Any) -> Any:
        decision = decide(problem, device, **how)
        for name, value in facts.items():
            object.__setattr__(decision, name, value)
        return decision

    monkeypatch.setattr(dispatch, "decide", with_facts)
    return stand_ins


X = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)


def test_a_kernel(explained: Any) -> None:
    found = jaxsoftmax.explain(X)
    assert (found.kernel, found.config, found.implementation) == ("stand-in", "Config(rows=4)", "mosaic_gpu")
    assert str(found).splitlines() == [
        "softmax of bfloat16[8192,4096] along axis 1",
        "  here: no CUDA device, so XLA runs the reference",
        "  on NVIDIA H200: kernel stand-in",
        "    why: it is the only one",
        "    moves: 2.0 MB by the kernel; the whole call no less than 134.2 MB",
        "    takes: about 32 us at 4.2 TB/s",
    ]
    assert "  on NVIDIA H200: kernel stand-in, Config(rows=4)" in str(jaxsoftmax.explain(X, verbose=True))


def test_no_kernel(explained: Any) -> None:
    explained.accepts = lambda _: False
    assert str(jaxsoftmax.explain(jnp.zeros((3, 5)), None, device=A100)).splitlines() == [
        "softmax of float32[3,5] along axis 0, 1",
        "  here: no CUDA device, so XLA runs the reference",
        "  on NVIDIA A100: XLA runs the reference",
        "    why: no kernel takes the call",
        "    moves: nothing can move less than 120 B",
        "    takes: less than a microsecond, beside its launches",
        "    not first: it is not for this",
        "    not second: it is not for this",
    ]
    assert jaxsoftmax.explain(X, implementation="mosaic_gpu").implementation == "error"
    assert jaxsoftmax.explain(X, implementation="xla").declined == ()


@pytest.mark.parametrize("op", ["log_softmax", "log_softmax_vjp", "log_softmax_jvp"])
def test_who_computes_log_softmax(op: str) -> None:
    short = jaxsoftmax.explain(jax.ShapeDtypeStruct((512, 4096), jnp.float32), op=op)
    assert (short.implementation, short.kernel, short.config, short.bytes_moved) == ("xla", None, None, None)
    assert ("block", "XLA reads such rows once, and fuses them with what consumes the result") in short.declined
    assert short.notes == ("implementation='mosaic_gpu' would run a kernel",)
    assert jaxsoftmax.explain(jax.ShapeDtypeStruct((512, 4096), jnp.bfloat16), op=op).kernel in ("block", "warp")
    x = jax.ShapeDtypeStruct((8192, 50257), jnp.bfloat16)
    long, whole = jaxsoftmax.explain(x, op=op), jaxsoftmax.explain(x, op=op, implementation="mosaic_gpu")
    stats = jaxsoftmax.explain(x, axis=-1, op="logsumexp")
    assert (long.implementation, long.kernel, long.config) == ("mosaic_gpu", stats.kernel, stats.config)
    assert "it finds the rows' statistics, and XLA computes the rest, which it fuses" in long.reason
    assert long.bytes_moved < long.least_bytes == whole.least_bytes <= whole.bytes_moved
    assert whole.reason.startswith("the fastest kernel")
    with jaxsoftmax.batch_invariant():
        assert jaxsoftmax.explain(X, op=op).kernel in ("block", "warp")


def test_weights_of_a_logsumexp_have_no_kernel() -> None:
    b = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    found = jaxsoftmax.explain(X, op="logsumexp", b=b)
    assert (found.implementation, found.kernel, found.least_bytes) == ("xla", None, 2 * (8192 * 4096 + 4096 + 8192))
    assert "weights are computed by jax.scipy.special.logsumexp" in str(found)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "logsumexp"])
def test_complex_numbers_have_no_kernel(op: str) -> None:
    found = jaxsoftmax.explain(jax.ShapeDtypeStruct((8, 16), jnp.complex64), op=op)
    assert (found.implementation, found.kernel) == ("xla", None)
    assert str(found).startswith(f"{op} of complex64[8,16]")
    assert "complex numbers are computed by jax." in found.reason


def test_symbolic_shapes() -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8"), jnp.float32)
    assert str(jaxsoftmax.explain(x)).splitlines() == [
        "softmax of float32[b,8] along axis 1",
        "  here: no CUDA device, so XLA runs the reference",
        "  on NVIDIA H200: XLA runs the reference",
        "    why: no kernel takes the call",
        "    moves: nothing can move less than 64*b B",
        "    not every kernel: is compiled for fixed, non-empty shapes, and a dimension is symbolic or zero",
    ]


def test_copies_are_said(explained: Any) -> None:
    x = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)
    where = jax.ShapeDtypeStruct((6, 1), jnp.bool_)
    assert jaxsoftmax.explain(x, (0, 2)).notes[0].startswith("operands are transposed by (1, 0, 2)")
    assert jaxsoftmax.explain(x, where=where).notes == ("where, of shape (1, 6, 1), is broadcast to (4, 6, 8)",)
    assert jaxsoftmax.explain(x, where=jax.ShapeDtypeStruct((8,), jnp.bool_)).notes == ()
    derivative = jaxsoftmax.explain(x, where=where, op="softmax_vjp")
    assert (derivative.implementation, derivative.notes) == ("xla", ())
    assert "XLA fuses with the derivative" in derivative.reason
    named = jaxsoftmax.explain(x, where=where, op="softmax_vjp", implementation="mosaic_gpu")
    assert "where is applied by XLA before and after the kernel" in named.notes
    assert "multiplies it in" in jaxsoftmax.explain(x, scale=jnp.ones((4, 1, 1))).notes[0]
    assert "multiplies it in" in jaxsoftmax.explain(x, scale=-1).notes[0]
    assert jaxsoftmax.explain(x, scale=np.float32(3)).notes == jaxsoftmax.explain(x, scale=3).notes == ()
    assert explained.problems[-1].scale == 3


def test_what_a_named_kernel_would_cost(explained: Any) -> None:
    explained.accepts = lambda problem: problem.inner == 1
    x = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)
    found = jaxsoftmax.explain(x, 1)
    assert (found.kernel, found.implementation) == (None, "xla")
    assert found.notes == ("implementation='mosaic_gpu' would run a kernel, between two transposed copies",)
    named = jaxsoftmax.explain(x, 1, implementation="mosaic_gpu")
    assert (named.kernel, named.implementation) == ("stand-in", "mosaic_gpu")
    assert "transposed" in named.notes[0]


@pytest.mark.parametrize("name", _explain._CALLS)
def test_every_op(explained: Any, name: str) -> None:
    options: dict[str, Any] = {"k": 8} if name == "top_k" else {}
    found = jaxsoftmax.explain(X, op=name, **options)
    assert str(found).startswith(name + " of bfloat16[8192,4096]")
    want = {"logsumexp": Op.STATS, "softmax_jvp": Op.SOFTMAX_TANGENT, "log_softmax_jvp": Op.LOG_SOFTMAX_TANGENT}
    want |= {"softmax_vjp": Op.SOFTMAX_TANGENT, "log_softmax_vjp": Op.LOG_SOFTMAX_COTANGENT}
    want |= dict.fromkeys(("cross_entropy_gradient", "cross_entropy_vjp"), Op.CROSS_ENTROPY)
    want |= {"top_k": Op.STATS}
    assert explained.problems[-1].op is want.get(name, Op(name) if name in set(Op) else None)


def test_options_are_the_calls(explained: Any) -> None:
    options = {"label_smoothing": 0.1, "logits_soft_cap": 30.0, "z_loss": 1e-4}
    found = jaxsoftmax.explain(X, op="cross_entropy_gradient", weights=1.0, **options)
    problem = explained.problems[-1]
    assert (problem.smoothing, problem.soft_cap, problem.z_loss) == (0.1, 30.0, 1e-4)
    # Labels and weights are read, and losses written, besides the logits and their gradient.
    assert found.least_bytes == 2 * 8192 * 4096 * 2 + 3 * 8192 * 4
    assert not found.notes
    with pytest.raises(TypeError, match="label_smoothing"):
        jaxsoftmax.explain(X, label_smoothing=0.1)


@pytest.mark.parametrize("options", [{}, {"weights": 1.0, "return_lse": True}], ids=["plain", "lse"])
def test_it_says_who_writes_a_loss_gradient(explained: Any, options: dict[str, Any]) -> None:
    found = jaxsoftmax.explain(X, op="cross_entropy_gradient", **options)
    assert explained.problems[-1].op is Op.CROSS_ENTROPY
    # The logits and the labels are read; losses, states and the gradient are written.
    assert found.least_bytes == 2 * 8192 * 4096 * 2 + 4 * 8192 * 4
    assert found.notes[0].startswith("the gradient, times whatever follows the loss, is written in another read")
    assert not jaxsoftmax.explain(X, op="cross_entropy", **options).notes


def test_what_is_selected_besides_the_kernel(explained: Any) -> None:
    x = jax.ShapeDtypeStruct((64, 32000), jnp.bfloat16)
    found = jaxsoftmax.explain(x, op="top_k", k=8, scale=0.5)
    problem = explained.problems[-1]
    chunks = 32000 // problem.cols
    assert (problem.rows, problem.scale) == (64 * chunks, 0.5)
    assert found.least_bytes == 64 * (32000 * 2 + 8 * (2 + 4))
    assert str(found).splitlines()[0] == "top_k of bfloat16[64,32000] along axis 1"
    of = f"each row's {chunks} chunks of {problem.cols}, of which 8 are taken apart"
    assert found.notes == (f"the kernel is for the statistics; radix_select finds the 8 largest of {of}",)
    found = jaxsoftmax.explain(x, op="top_k", k=8, implementation="xla")
    assert "XLA orders each row's" in found.notes[-1]
    found = jaxsoftmax.explain(jax.ShapeDtypeStruct((2, 50261), jnp.float32), op="top_k", k=3)
    filled = explained.problems[-1].rows // 2 * explained.problems[-1].cols
    assert found.notes[1] == f"the logits are filled up to {filled} columns: an extra copy"
    found = jaxsoftmax.explain(jnp.zeros((8, 16, 64)), 1, op="top_k", k=2, implementation="mosaic_gpu")
    assert (found.kernel, explained.problems[-1].cols) == ("stand-in", 16)
    assert str(found).startswith("top_k of float32[8,16,64] along axis 1")
    assert found.notes[0] == "axis 1 is moved to the end: an extra copy"
    assert found.notes[1:] == ("the kernel is for the statistics; radix_select finds the 2 largest of rows of 16",)
    found = jaxsoftmax.explain(jnp.zeros((8, 16)), op="top_k", k=9)
    assert "XLA orders rows of 16" in found.notes[0]
    assert found.declined[-1] == ("radix_select", "XLA sorts rows of 16 of which 9 are selected")
    found = jaxsoftmax.explain(x, op="top_k", k=8, device=A100)
    assert "XLA orders each row's" in found.notes[0]
    assert "compute capability 8.0" in dict(found.declined)["radix_select"]
    with pytest.raises(ValueError, match="k=9, expected 0 <= k <= 5"):
        jaxsoftmax.explain(jnp.zeros((2, 5)), op="top_k", k=9)
    with pytest.raises(TypeError, match="where"):
        jaxsoftmax.explain(X, op="top_k", k=2, where=jnp.ones(4096, bool))


def test_numbers_of_a_row_are_moved_too() -> None:
    x, mask = jax.ShapeDtypeStruct((8192, 1000), jnp.float32), jax.ShapeDtypeStruct((8192, 1000), jnp.bool_)
    moved = lambda op, **options: jaxsoftmax.explain(x, op=op, **options).bytes_moved
    logits, number = 8192 * 1000 * 4, 8192 * 4
    assert moved("logsumexp") == logits + 2 * number
    assert moved("logsumexp", where=mask) == logits + logits // 4 + 2 * number
    assert moved("cross_entropy_gradient", weights=1.0) == 2 * logits + 3 * number


HALF = [jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
Q, K, V = (jnp.zeros(shape) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)))


def test_a_kernel_of_attention(stand_ins: Any) -> None:
    x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
    found = jaxsoftmax.explain_attention(x, x, x, is_causal=True)
    assert str(found).splitlines() == [
        "flash_attention of bfloat16: query [2,1024,8,64], key [2,1024,8,64], value [2,1024,8,64]",
        "  here: no CUDA device, so XLA runs the reference",
        "  on NVIDIA H200: kernel stand-in",
        "    why: it is the only one",
        "    moves: nothing can move less than 8.5 MB",
        "    takes: at least 2.76 us at 780 TFLOP/s, for products of 2.15 GFLOP",
    ]
    assert jaxsoftmax.explain_attention(x, x, x, op="vjp").implementation == "mosaic_gpu"
    assert stand_ins.problems[-1].op is AttentionOp.BACKWARD
    pushed = jaxsoftmax.explain_attention(x, x, x, op="jvp")
    assert (pushed.implementation, pushed.reason) == ("xla", "forward mode has no kernel")


def test_no_kernel_of_attention(stand_ins: Any) -> None:
    stand_ins.accepts = lambda _: False
    mask = jax.ShapeDtypeStruct((5, 7), jnp.bool_)
    found = jaxsoftmax.explain_attention(Q, K, V, mask=mask, key_value_seq_lengths=np.array([3, 4]), device=A100)
    assert (found.kernel, found.implementation) == (None, "xla")
    assert str(found).splitlines()[-1] == "    not attention: it is not for this"
    named = jaxsoftmax.explain_attention(Q, K, V, implementation="mosaic_gpu")
    assert named.implementation == "error"
    assert jaxsoftmax.explain_attention(Q, K, V, implementation="xla").declined == ()


def test_it_takes_what_the_call_takes(stand_ins: Any) -> None:
    """NumPy's numbers and dtypes have shapes, and are no arrays."""
    numbers = {"scale": np.float32(0.5), "logits_soft_cap": np.array(2.0), "local_window_size": np.int64(3)}
    jaxsoftmax.explain_attention(*HALF, **numbers, is_causal=np.bool_(True), dtype=jnp.dtype("float16"))
    (problem,) = stand_ins.problems
    assert (problem.scale, problem.soft_cap, problem.window, problem.dtype) == (0.5, 2.0, (3, 3), jnp.float16)
    for op in ("vjp", "jvp"):
        assert "bias [1,1,5,7]" in jaxsoftmax.explain_attention(Q, K, V, np.ones((5, 7), int), op=op).call
    assert not stand_ins.problems[-1].bias_gradient


def test_what_runs_dropout() -> None:
    dropout = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    found = jaxsoftmax.explain_attention(*HALF, **dropout)
    assert (found.implementation, found.kernel) == ("mosaic_gpu", "attention_twice")
    assert str(found.config).startswith("Passes(kept=ForwardConfig(")
    found = jaxsoftmax.explain_attention(*HALF, op="vjp", **dropout, device=A100)
    assert found.implementation == "xla"
    assert "XLA holds all logits at a time" in found.notes


@pytest.mark.parametrize(
    "queries, keys, heads, words",
    [
        (1, 16384, (8, 8), "the keys go in 16 splits, because the queries are 8 tiles and 132 CTAs run"),
        (300, 16384, (4, 4), "the keys go in 11 splits, because the queries are 12 tiles and 132 CTAs run"),
        (1, 1024, (264, 264), "it takes the problem"),
    ],
)
def test_why_keys_go_in_splits(queries: int, keys: int, heads: tuple[int, int], words: str) -> None:
    """With the tiles that a call without splits has: 12 of 128 queries, of three for each of four heads."""
    query, key = (
        jax.ShapeDtypeStruct((1, n, h, 128), jnp.bfloat16) for n, h in zip((queries, keys), heads, strict=True)
    )
    reason = jaxsoftmax.explain_attention(query, key, key, device=H200).reason
    assert words in reason
    assert ("splits" in words) == ("splits" in reason)


HIDDEN, WEIGHT = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 500, 512), (512, 32000)))
TARGETS = jax.ShapeDtypeStruct((2, 500), jnp.int32)
explain_linear = functools.partial(jaxsoftmax.explain_linear_cross_entropy, HIDDEN, WEIGHT, TARGETS)


def test_a_kernel_of_losses_without_logits() -> None:
    found = explain_linear(return_entropy=True, scale=0.5, ignore_index=-1)
    assert (found.kernel, found.implementation, found.declined) == ("linear_cross_entropy", "mosaic_gpu", ())
    assert str(found).splitlines() == [
        "linear_cross_entropy of bfloat16: hidden [2,500,512], weight [512,32000]",
        "  here: no CUDA device, so XLA runs the reference",
        "  on NVIDIA H200: kernel linear_cross_entropy",
        "    why: product and online softmax are one kernel; config by the heuristic",
        "    moves: nothing can move less than 33.8 MB",
        "    takes: at least 42 us at 780 TFLOP/s, for products of 32.77 GFLOP",
    ]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"bias": np.ones(32000, np.float32)}, "the kernel takes no bias"),
        ({"where": jax.ShapeDtypeStruct((2, 500), jnp.bool_)}, "the kernel takes no mask"),
        ({"scale": jax.ShapeDtypeStruct((2, 500, 1), jnp.float32)}, "the kernel takes a scale that is a positive num"),
        ({"scale": -1.0}, "the kernel takes a scale that is a positive number"),
        ({"label_smoothing": 0.1}, "the kernel does not smooth labels"),
        ({"precision": "highest"}, "the kernel has no precision to choose"),
        ({"chunk_size": 250}, "chunk_size is given"),
        ({"implementation": "xla"}, "implementation='xla'"),
        ({"device": A100}, "NVIDIA A100 has compute capability 8.0"),
        ({"hidden": jax.ShapeDtypeStruct((2, 500, 512), jnp.float32)}, "the kernel multiplies 16-bit floats"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x,
)
def test_why_losses_are_in_chunks(explained: Any, options: dict[str, Any], reason: str) -> None:
    given = {"hidden": HIDDEN, "weight": WEIGHT, "labels": TARGETS} | options
    found = jaxsoftmax.explain_linear_cross_entropy(**given)
    chunks = "4 chunks of 250 tokens" if "chunk_size" in options else "one chunk of all tokens"
    assert found.reason.startswith(f"{chunks}, as {reason}")
    assert found.kernel == (None if options.get("implementation") == "xla" else "stand-in")
    assert found.declined[0][0] == "linear_cross_entropy"
    explained.accepts = lambda _: False
    runs = "xla" if "implementation" in options else "error"
    assert jaxsoftmax.explain_linear_cross_entropy(**{"implementation": "mosaic_gpu"} | given).implementation == runs


def test_how_many_tokens_a_chunk_has(explained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the call itself decides, where they do not divide the tokens too; gradients take more memory a logit."""
    asked, of_logits = [], chunks.BYTES

    def chunk_size(tokens: int, vocabulary: int, bytes_each: int, _: int | None, bytes_of_all: int = of_logits) -> int:
        assert bytes_of_all == (chunks.KERNEL_BYTES if bytes_each == 2 else of_logits)
        asked.append((tokens, vocabulary, bytes_each))
        return 1200 // bytes_each

    monkeypatch.setattr(chunks, "chunk_size", chunk_size)
    found = explain_linear(label_smoothing=0.1, op="vjp", return_lse=True)
    assert found.reason == "4 chunks of 300 tokens, as the kernel does not smooth labels"
    assert found.notes == ("the gradients are computed in 5 chunks of 200 tokens, from logits computed again",)
    assert explained.problems[-1].rows == 300
    assert {bytes_each for *_, bytes_each in asked} == {4, 6}
    found = explain_linear(weights=1.0, op="vjp")
    assert found.reason.startswith("2 chunks of 600 tokens, as product and online softmax are one kernel")
    assert (found.kernel, found.notes) == ("linear_cross_entropy", ())
    assert explain_linear(op="vjp").notes == ()
    found = explain_linear(weights=1.0, op="vjp", label_smoothing=0.1)
    assert found.reason == "5 chunks of 200 tokens, as the kernel does not smooth labels"
    assert explain_linear(op="vjp", return_lse=True, weights=1.0).kernel == "linear_cross_entropy"
    # Hidden states, weight and labels are read, and gradients of the first two written.
    assert explain_linear(op="vjp").least_bytes == 2 * 2 * (1000 * 512 + 512 * 32000) + 4 * 1000
    assert explain_linear(op="jvp").notes[0].startswith("the tangents are computed in 7 chunks of 150 tokens")


def test_the_loss_of_symbolic_shapes() -> None:
    hidden = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 512"), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct(hidden.shape[:1], jnp.int32)
    found = jaxsoftmax.explain_linear_cross_entropy(hidden, WEIGHT, labels)
    assert found.reason == "one chunk of all tokens, as the kernel is compiled for fixed shapes"
