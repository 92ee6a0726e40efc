"""A kernel refuses what it does not name: an operand that it does not read, an operation that `row_ops` lacks."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxsoftmax._cross_entropy import linear_kernel
from pallas_kernels.attention import dispatch as attention
from pallas_kernels.attention import problem as of_attention
from pallas_kernels.attention.problem import Attention, Operand, Rules
from pallas_kernels.hardware import A100, B200, H100, H200, Device
from pallas_kernels.softmax import dispatch, row_ops
from pallas_kernels.softmax.problem import Op, Problem

BF16 = jnp.dtype(jnp.bfloat16)
SLOPES = Operand(1, "query", broadcasts=True, has_batch=False, problem_field="slopes")
SHAPES = {"query": (2, 256, 8, 64), "key": (2, 256, 2, 64), "value": (2, 256, 2, 64)}


@dataclasses.dataclass(frozen=True)
class WithSlopes(Attention):
    """The problem of a call with an operand that no kernel has heard of."""

    slopes: bool = dataclasses.field(default=False, kw_only=True)


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds the operand, and makes the problem of a call with it; `in_kernels` is what kernels say of it."""

    def add(in_kernels: bool) -> Any:
        operand = SLOPES._replace(in_kernels=True) if in_kernels else SLOPES
        known = {**of_attention.OPERANDS, "slopes": operand}
        fields = [(name, Annotated[Any, known[name]]) for name in (*of_attention.Operands._fields, "slopes")]
        monkeypatch.setattr(of_attention, "Operands", NamedTuple("Operands", fields))
        monkeypatch.setattr(of_attention, "OPERANDS", known)
        monkeypatch.setattr(of_attention, "Attention", WithSlopes)
        read = {name for name, operand in known.items() if operand.in_kernels}
        monkeypatch.setattr(of_attention, "IN_KERNELS", read | {"block_tables"})

        def problem(op: of_attention.Op, **more: Any) -> Attention:
            shapes = SHAPES | {"slopes": (8,)} | more
            return of_attention.problem_of(op, shapes, dict.fromkeys(shapes, BF16), Rules(), lse_gradient=False)

        return problem

    return add


@pytest.mark.parametrize("device", [H200, H100, A100, B200], ids=lambda device: device.card)
@pytest.mark.parametrize("op", of_attention.Op)
def test_an_operand_that_kernels_do_not_name_is_refused(slopes: Any, op: of_attention.Op, device: Device) -> None:
    problem = slopes(in_kernels=False)(op)
    assert of_attention.operand_names(problem) == ("query", "key", "value", "slopes")
    found = attention.decide(problem, device)
    assert found.chosen is None
    assert set(dict(found.declined)) == set(attention.KERNELS[op])
    if device.compute_capability == "9.0":
        assert all("slopes" in why for _, why in found.declined)
    assert attention.decide(dataclasses.replace(problem, slopes=False), device).chosen is not None


@pytest.mark.parametrize("op", of_attention.Op)
def test_dropout_in_two_passes_refuses_it_too(slopes: Any, op: of_attention.Op) -> None:
    problem = slopes(in_kernels=False)(op, keep=(2, 8, 256, 256))
    found = attention.decide(problem, H200, named=True)
    assert found.chosen is None
    assert "slopes" in found.declined[0][1]
    assert attention.decide(dataclasses.replace(problem, slopes=False), H200, named=True).chosen is not None


@pytest.mark.parametrize("op", of_attention.Op)
def test_an_operand_that_they_name_is_not(slopes: Any, op: of_attention.Op) -> None:
    assert attention.decide(slopes(in_kernels=True)(op), H200).implementation == "mosaic_gpu"


def test_an_operand_is_not_read_unless_it_says_so() -> None:
    assert not Operand(1).in_kernels
    read = {name for name, operand in of_attention.OPERANDS.items() if operand.in_kernels}
    assert read == set(of_attention.Operands._fields) - {"window_sizes", "cap", "keep"}


def test_the_kernel_of_a_loss_of_a_product_refuses_an_operand_that_it_does_not_read() -> None:
    shapes = {"hidden": (64, 128), "weight": (128, 1024), "labels": (64,)}
    operands = {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}
    decide = lambda **more: linear_kernel.decide(linear_kernel.Rules(), operands | more, H200)
    assert decide().kernel == "linear_cross_entropy"
    for name in ("temperatures", "cotangent_max"):
        decision = decide(**{name: operands["labels"]})
        assert decision.kernel is None
        assert decision.declined == (("linear_cross_entropy", f"the kernel does not read {name}"),)


def made_up() -> Any:
    """An operation that is of the type, and of which nothing is known."""
    op = str.__new__(Op, "sparsemax")
    op._name_, op._value_ = "SPARSEMAX", "sparsemax"
    return op


@pytest.mark.parametrize("cols", [64, 4096, 50257, 2**20])
@pytest.mark.parametrize("kernel", [None, *dispatch.KERNELS])
def test_an_operation_that_kernels_do_not_name_is_refused(kernel: str | None, cols: int) -> None:
    found = dispatch.decide(Problem(made_up(), 256, cols, BF16), H200, kernel=kernel, alone=True)
    assert found.chosen is None
    # Two look at the row's length first.
    refused = [name for name, why in found.declined if why == "the kernels have no sparsemax"]
    assert refused == [name for name in dispatch.KERNELS if cols <= 4096 or name not in ("naive", "warp")]


@pytest.mark.parametrize("op", Op)
def test_an_operation_without_a_row_is_refused(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(op, 256, 1024, BF16)
    assert dispatch.decide(problem, H200).chosen is not None
    monkeypatch.delitem(row_ops.OPERATIONS, op)
    assert dispatch.decide(problem, H200).chosen is None
