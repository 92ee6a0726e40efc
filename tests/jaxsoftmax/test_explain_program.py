"""`explain(f)(*args)`: what it lists of a program is what is lowered, on each card."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.primitives import PRIMITIVES
from jaxsoftmax._explain.program import DIRECTIONS
from pallas_kernels import hardware
from tests.jaxsoftmax.sharded import mesh

bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
ROWS, LABELS, QKV = bf16(64, 1024), int32(64), [bf16(2, 128, heads, 64) for heads in (8, 2, 2)]
PAGES = [bf16(2, 8, 64), *[bf16(2, 64, 16, 64)] * 2, int32(2, 8), int32(2)]
FLOATS = [x.update(dtype=jnp.float32) for x in QKV]
LINEAR = [bf16(64, 128), bf16(128, 1024), LABELS]

loss = jaxsoftmax.softmax_cross_entropy_with_integer_labels
causal = functools.partial(jaxsoftmax.flash_attention, is_causal=True)
added = lambda x: x.astype(jnp.float32).sum()
gradient = lambda f, *wrt: jax.grad(lambda *xs: jnp.sin(f(*xs).astype(jnp.float32)).sum(), wrt or 0)


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jaxsoftmax.softmax(c), None), x, length=12)[0]


def in_parts(x: jax.Array) -> jax.Array:
    return jax.shard_map(jaxsoftmax.softmax, mesh=mesh(), in_specs=P("d", None), out_specs=P("d", None))(x)


def some_of(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 0, jaxsoftmax.softmax, lambda x: x, x)


# A program, its operands, and its calls on an H200: function, direction, kernel; a number where it is not 1.
Wanted = list[tuple[Any, ...]]
CE, FLASH, PRODUCT = "softmax_cross_entropy_with_integer_labels", "flash_attention", "linear_cross_entropy"
SOFTMAX: Wanted = [("softmax", "forward", "warp")]
BOTH: Wanted = [*SOFTMAX, ("softmax", "vjp", "warp")]
ATTENTION: Wanted = [(FLASH, "forward", "attention"), (FLASH, "vjp", "attention_gradients")]
PROGRAMS: dict[str, tuple[Callable[..., Any], list[Any], Wanted]] = {
    "softmax": (jaxsoftmax.softmax, [ROWS], SOFTMAX),
    "its gradient": (gradient(jaxsoftmax.softmax), [ROWS], BOTH),
    "log_softmax's gradient": (
        *(gradient(jaxsoftmax.log_softmax), [ROWS]),
        [("log_softmax", "forward", "warp"), ("log_softmax", "vjp", "warp")],
    ),
    "loss": (loss, [ROWS, LABELS], [(CE, "forward", "warp")]),
    "loss and gradient": (
        *(gradient(loss), [ROWS, LABELS]),
        [(CE, "forward", "warp"), (CE, "vjp", "warp")],
    ),
    "weighted loss and gradient": (
        *(jax.value_and_grad(lambda x, y: loss(x, y, weights=1 / 64).sum()), [ROWS, LABELS]),
        [(CE, "forward and vjp", "warp")],
    ),
    "loss of probabilities": (
        *(jaxsoftmax.softmax_cross_entropy, [ROWS, ROWS]),
        [("softmax_cross_entropy", "forward", None)],
    ),
    "loss of probabilities and gradient": (
        *(gradient(jaxsoftmax.softmax_cross_entropy), [ROWS, ROWS]),
        [("softmax_cross_entropy", "forward", None)],
    ),
    "attention": (causal, QKV, ATTENTION[:1]),
    "attention's gradients": (gradient(causal, 0, 1, 2), QKV, ATTENTION),
    "attention of float32": (causal, FLOATS, [(FLASH, "forward", None)]),
    "pages": (jaxsoftmax.paged_attention, PAGES, [("paged_attention", "forward", "attention")]),
    "top_k": (functools.partial(jaxsoftmax.top_k_softmax, k=4), [ROWS], [("top_k_softmax", "forward", "warp")]),
    "linear": (jaxsoftmax.linear_cross_entropy, LINEAR, [(PRODUCT, "forward", PRODUCT)]),
    "biased linear": (
        *(functools.partial(jaxsoftmax.linear_cross_entropy, bias=jnp.ones(1024)), LINEAR),
        [(PRODUCT, "forward", "warp")],
    ),
    "linear by XLA": (
        *(functools.partial(jaxsoftmax.linear_cross_entropy, implementation="xla"), LINEAR),
        [(PRODUCT, "forward", None)],
    ),
    "linear's gradient": (
        *(jax.grad(lambda *xs: jaxsoftmax.linear_cross_entropy(*xs, weights=1.0).sum(), (0, 1)), LINEAR),
        [(PRODUCT, "forward and vjp", PRODUCT), (PRODUCT, "vjp", PRODUCT, None)],
    ),
    "jit": (jax.jit(lambda x: jaxsoftmax.softmax(2 * x)), [ROWS], SOFTMAX),
    "vmap": (jax.vmap(jaxsoftmax.softmax), [ROWS], SOFTMAX),
    "scan": (scanned, [ROWS], [("softmax", "forward", "warp", 12)]),
    "scan's gradient": (
        *(gradient(scanned), [ROWS]),
        [("softmax", "forward", "warp", 12), ("softmax", "vjp", "warp", 12)],
    ),
    "remat": (gradient(jax.checkpoint(lambda x: jaxsoftmax.softmax(jnp.sin(x)))), [ROWS], [(*SOFTMAX[0], 2), BOTH[1]]),
    "shard_map": (in_parts, [ROWS], SOFTMAX),
    "branch": (some_of, [ROWS], [("softmax", "forward", "warp", None)]),
    "twice": (lambda x: [jaxsoftmax.softmax(x) for x in (x, 2 * x)], [ROWS], [("softmax", "forward", "warp", 2)]),
    "none": (lambda x: jnp.exp(x) / jnp.exp(x).sum(), [ROWS], []),
}

# What the lowered kernels are called, by function and direction.
NAMES = {
    ("softmax", "forward"): "softmax_{}",
    ("softmax", "vjp"): "softmax_tangent_{}",
    ("log_softmax", "forward"): "log_softmax_{}",
    ("log_softmax", "vjp"): "log_softmax_cotangent_{}",
    (CE, "forward"): "cross_entropy_{}",
    (CE, "vjp"): "cross_entropy_gradient_{}",
    (CE, "forward and vjp"): "cross_entropy_gradient_{}",
    ("softmax_cross_entropy", "forward"): "stats_{}",
    ("top_k_softmax", "forward"): "stats_{}",
    (FLASH, "vjp"): "attention_backward",
    ("paged_attention", "forward"): "{}",
}
BESIDES = {"stable", "radix_select", "linear_cross_entropy_gradient", "attention_gradients_merge"}


def lowered(function: Callable[..., Any], operands: list[Any]) -> set[str]:
    """The kernels in a program for CUDA."""
    jax.clear_caches()
    text = jax.jit(lambda *xs: function(*xs)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    named = {name for name in re.findall(r"(?<=\\00)([a-z_]+)_mosaic_gpu(?![a-z_])", text)}
    return (named - BESIDES) | {
        f"cudnn {x}" for x in re.findall(r"__cudnn\$fmha(?:ScaleBias)?Softmax(Backward)?\(", text)
    }


def as_lowered(call: jaxsoftmax.Explanation) -> str:
    if call.implementation == "cudnn":
        return "cudnn " + ("Backward" if call.direction == "vjp" else "")
    if (call.function, call.kernel) == (PRODUCT, "warp"):
        return "cross_entropy_warp"
    return NAMES.get((call.function, call.direction), "{}").format(call.kernel)


@pytest.mark.parametrize("device", ["H200", "A100", "B200"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_listed_is_what_is_lowered(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, operands, wanted = PROGRAMS[name]
    found = jaxsoftmax.explain(function, device=device)(*operands)
    if device == "H200":
        assert [(c.function, c.direction, c.kernel, c.times) for c in found.calls] == [(*w, 1)[:4] for w in wanted]
        assert bool(found.calls) == (found.seconds > 0 or name == "branch")
    else:
        assert [(c.function, c.direction) for c in found.calls] == [w[:2] for w in wanted]
        assert {c.implementation for c in found.calls} <= {"xla", "cudnn"}
    assert all(c.device is hardware.NAMED[device] for c in found.calls)
    assert not found.here
    monkeypatch.setattr(hardware, "present", lambda: hardware.NAMED[device])
    assert {as_lowered(c) for c in found.calls if c.kernel} == lowered(function, operands)
    jax.clear_caches()


explain, explain_attention = jaxsoftmax.explain, functools.partial(jaxsoftmax.explain_attention, is_causal=True)
explain_linear = jaxsoftmax.explain_linear_cross_entropy
# Programs of one call, and the explanation of that call by itself.
EXPLAINED: dict[str, jaxsoftmax.Explanation] = {
    "softmax": explain(ROWS),
    "its gradient": explain(ROWS, op="softmax_vjp"),
    "log_softmax's gradient": explain(ROWS, op="log_softmax_vjp"),
    "loss": explain(ROWS, op="cross_entropy"),
    "loss and gradient": explain(ROWS, op="cross_entropy_gradient"),
    "weighted loss and gradient": explain(ROWS, op="cross_entropy_gradient", weights=1.0),
    "attention": explain_attention(*QKV),
    "attention's gradients": explain_attention(*QKV, op="vjp"),
    "attention of float32": explain_attention(*FLOATS),
    "linear": explain_linear(*LINEAR),
    "linear's gradient": explain_linear(*LINEAR, op="vjp", weights=1.0),
    "biased linear": explain_linear(*LINEAR, bias=jnp.ones(1024)),
    "linear by XLA": explain_linear(*LINEAR, implementation="xla"),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_call_is_explained_as_in_a_program(name: str) -> None:
    function, operands, _ = PROGRAMS[name]
    calls, alone = jaxsoftmax.explain(function)(*operands).calls, EXPLAINED[name]
    assert alone.implementation in {call.implementation for call in calls}
    assert bool(alone.kernel) == any(call.kernel for call in calls)


def test_every_primitive_is_listed_or_known_not_to_be() -> None:
    small = {"below", "is_evaluated", "capped", "times", "row_dot", "weigh", "flash_attention_residuals"}
    assert {primitive.name for primitive in PRIMITIVES} - small == DIRECTIONS.keys()


def test_the_words_of_a_program() -> None:
    def model(x: jax.Array, y: jax.Array) -> jax.Array:
        return loss(x, y, weights=1.0).sum() + added(jax.nn.softmax(x))

    found = jaxsoftmax.explain(jax.grad(model), device="H200")(bf16(8192, 50257), int32(8192))
    line = model.__code__.co_firstlineno + 1
    name = Path(__file__).name
    moves = "1.6 GB by the kernel; the whole call no less than 1.6 GB"
    assert str(found).splitlines() == [
        "on NVIDIA H200; here: no CUDA device, so XLA runs the references",
        f"  forward and vjp of {CE} of bfloat16[8192,50257] along axis 1 ({name}:{line})",
        "    kernel block",
        f"    why: {found.calls[0].reason}",
        f"    moves: {moves}",
        "    takes: about 392 us at 4.2 TB/s",
        "  all of these: no less than 392 us",
        f"  outside: jax.nn.softmax at {name}:{line}; jaxsoftmax.patch() would take it",
        "  not seen: softmax written by hand, and what other libraries' kernels do",
    ]
    (call,) = found.calls
    assert call.operands == ("bfloat16[8192,50257]", "int32[8192,1]", "float32[8192,1]")
    assert call.seconds == pytest.approx(call.bytes_moved / 4.2e12, rel=1e-3)
    verbose = str(jaxsoftmax.explain(jax.grad(model), device="H200", verbose=True)(bf16(8192, 50257), int32(8192)))
    assert str(call.config) in verbose
    assert str(call.config) not in str(found)
    assert "    not warp: " in verbose


def stock(x: jax.Array, y: jax.Array) -> jax.Array:
    q = x.reshape(1, 8, 8, -1)
    total = added(jax.nn.softmax(x)) + added(jax.nn.log_softmax(x)) + added(jax.nn.logsumexp(x))
    total += added(jax.nn.dot_product_attention(q, q, q))
    return total + added(optax.softmax_cross_entropy_with_integer_labels(x, y))


STOCK = ["jax.nn.softmax", "jax.nn.log_softmax", "jax.nn.logsumexp", "jax.nn.dot_product_attention"]
STOCK += ["optax.softmax_cross_entropy_with_integer_labels"]


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.grad, jax.jit, lambda f: jax.grad(jax.checkpoint(f))], ids=["", "grad", "jit", "remat"]
)
def test_functions_of_others_are_named_as_outside(around: Any) -> None:
    found = jaxsoftmax.explain(around(stock))(bf16(64, 512), LABELS)
    assert not found.calls
    assert {x.function for x in found.outside} == {*STOCK}
    assert {x.site.partition(":")[0] for x in found.outside} == {Path(__file__).name}
    assert len(found.outside) == len(STOCK)
    assert "no call of jaxsoftmax" in str(found)


def test_under_a_patch_they_are_ours() -> None:
    with jaxsoftmax.patch():
        found = jaxsoftmax.explain(stock)(bf16(64, 512), LABELS)
    assert [call.function for call in found.calls] == ["softmax", "log_softmax", "logsumexp", FLASH, CE]
    assert found.outside == ()


def test_flop_of_attention_counts_what_rules_leave() -> None:
    flop = lambda f, *xs: [call.flop for call in jaxsoftmax.explain(f, device="H200")(*xs).calls]
    whole = 2 * 2 * 8 * 128 * 128 * 2 * 64
    assert flop(jaxsoftmax.flash_attention, *QKV) == [whole]
    assert flop(gradient(jaxsoftmax.flash_attention, 0, 1, 2), *QKV) == [whole, whole * 5 // 2]
    assert flop(causal, *QKV) == [whole * 129 // 256]
    assert flop(functools.partial(causal, local_window_size=(1, 0)), *QKV) == [2 * 2 * 8 * 255 * 2 * 64]
    lengths = jnp.array([3, 4])
    assert flop(functools.partial(causal, key_value_seq_lengths=lengths), *QKV) == [None]
    assert flop(jaxsoftmax.linear_cross_entropy, *LINEAR) == [2 * 64 * 128 * 1024]


def test_arguments_are_trees_and_what_is_no_array_stays_as_it_is() -> None:
    def program(tree: dict[str, Any], axis: int, *, how: str) -> Any:
        return jaxsoftmax.softmax(tree["x"], axis) if how == "rows" else tree["x"]

    found = jaxsoftmax.explain(program)({"x": ROWS, "other": None}, -1, how="rows")
    assert [call.operands for call in found.calls] == [("bfloat16[64,1024]",)]
    assert not jaxsoftmax.explain(program)({"x": jnp.ones((2, 3))}, -1, how="").calls
    with pytest.raises(ValueError, match="softmax: axis 7 is out of bounds"):
        jaxsoftmax.explain(program)({"x": ROWS}, 7, how="rows")


def test_a_part_of_a_shard_map_is_what_a_device_has() -> None:
    (call,) = jaxsoftmax.explain(in_parts)(ROWS).calls
    assert call.operands == (f"bfloat16[{64 // mesh().shape['d']},1024]",)


def test_a_kernel_by_name_that_declines_is_an_error_of_its_call_alone() -> None:
    by_name = functools.partial(jaxsoftmax.softmax, implementation="mosaic_gpu")
    found = jaxsoftmax.explain(lambda x: (by_name(x), jaxsoftmax.softmax(x)), device="A100")(ROWS)
    assert [call.implementation for call in found.calls] == ["error", "xla"]
    assert "compute capability 8.0" in str(found)
    assert [call.seconds is None for call in found.calls] == [True, False]


def test_nothing_is_recorded_afterwards() -> None:
    jaxsoftmax.explain(jaxsoftmax.softmax)(ROWS)
    assert lowered(jaxsoftmax.softmax, [ROWS]) == {"softmax_warp"}


SCRIPT = """
import jax, jaxsoftmax
step = lambda: (jaxsoftmax.softmax, [jax.ShapeDtypeStruct((64, 1024), "bfloat16")])
wrong = lambda: 3
"""


def test_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "a_model.py").write_text(SCRIPT)

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "jaxsoftmax.explain", *words]
        path = {"PYTHONPATH": f"{Path(jaxsoftmax.__file__).parents[1]}", "JAX_PLATFORMS": "cpu"}
        found = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
        return found.returncode, found.stdout + found.stderr

    code, text = run("a_model:step", "--device", "B200")
    assert code == 0
    assert text.startswith("on NVIDIA B200")
    assert "softmax of bfloat16[64,1024] along axis 1" in text
    for words, wrong in (
        (["a_model:wrong"], "a_model:wrong returns a int, wanted a pair of a function and its arguments"),
        (["a_model"], "got 'a_model', wanted MODULE:FUNCTION"),
    ):
        code, text = run(*words)
        assert (code, wrong in text) == (2, True)


def test_the_module_of_the_script_does_not_hide_the_function() -> None:
    program = "import jaxsoftmax.explain; print(jaxsoftmax.explain is jaxsoftmax._explain.explain)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["True"]
