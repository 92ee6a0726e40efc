"""What the kernels are asked in tests: problems, and operands in which every row is another kind of trouble."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hardware import H200
from pallas_kernels.softmax.problem import IGNORED, Op, Problem

DTYPES = tuple(jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))
INF, NAN = np.float32(np.inf), np.float32(np.nan)


def _row(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    normal = rng.standard_normal(n).astype(np.float32)
    match kind:
        case "spikes":
            return np.where(rng.random(n) < 0.01, 20, normal)
        case "constant":
            return np.full(n, 0.375, np.float32)
        case "negative":
            return -200 - 10 * np.abs(normal)
        case "holes":
            return np.where(rng.random(n) < 0.5, -INF, normal)
        case "late" | "early":
            normal[slice(n * 3 // 4) if kind == "late" else slice(-(-n // 4), None)] = -INF
            return normal
        case "empty":
            return np.full(n, -INF)
        case "far":
            return np.full(n, -1e10)
        case "last column largest" | "+inf" | "nan":
            normal[-1] = {"+inf": INF, "nan": NAN}.get(kind, 12)
            return normal
        case "first column largest" | "+inf first" | "nan first":
            normal[0] = {"+inf first": INF, "nan first": NAN}.get(kind, 12)
            return normal
        case _:
            scale, shift = {
                "normal 0.1": (0.1, 0), "normal 1": (1, 0), "normal 30": (30, 0),
                "shift 1e4": (1, 1e4), "shift -1e4": (1, -1e4),
            }[kind]  # fmt: skip
            return np.float32(scale) * normal + np.float32(shift)


# Rows of NaN and infinities stand between sound ones, so that what leaks out of a row is seen.
ROW_KINDS = (
    "normal 1", "nan", "normal 0.1", "+inf first", "normal 30", "empty", "spikes", "nan first", "constant",
    "shift 1e4", "+inf", "negative", "holes", "shift -1e4", "last column largest", "first column largest",
    "late", "early",
)  # fmt: skip
LINEAR_ROW_KINDS = tuple(k for k in ROW_KINDS if k not in ("empty", "+inf", "+inf first"))


def row_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds of the problem's rows, which follow one another cyclically."""
    kinds = LINEAR_ROW_KINDS if problem.op.is_linear else ROW_KINDS
    # Numbers whose product with a scale is rounded by more than weights can differ.
    return kinds if problem.unit == 1.0 or problem.dtype == jnp.float16 else (*kinds[:-1], "far", kinds[-1])


def _rows(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    kinds, count = row_kinds(problem), problem.rows * problem.inner
    few = np.stack([_row(kinds[i % len(kinds)], problem.cols, rng) for i in range(min(count, 4 * len(kinds)))])
    rows = np.resize(few, (count, problem.cols))
    return _inner_last(rows, problem)


def _inner_last(rows: np.ndarray, problem: Problem) -> np.ndarray:
    if problem.inner == 1:
        return rows
    return np.moveaxis(rows.reshape(problem.rows, problem.inner, problem.cols), 1, 2)


def rows_of(array: np.ndarray, problem: Problem) -> np.ndarray:
    """`[rows, cols]` or `[rows, cols, inner]` as one row after another."""
    array = np.asarray(array)
    return array if problem.inner == 1 else np.moveaxis(array, 1, 2).reshape(-1, problem.cols)


def _mask(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    if problem.where == "shared":
        return rng.random(problem.cols) < 0.7
    rows = rng.random((problem.rows * problem.inner, problem.cols)) < 0.7
    rows[2::7], rows[3::7] = False, True
    return _inner_last(rows, problem)


def _labels(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """The first and the last column, any, and of some rows none."""
    rows = np.arange(problem.rows)
    labels = rng.integers(0, problem.cols, problem.rows, np.int32)
    labels = np.where(rows % 5 == 0, 0, np.where(rows % 5 == 1, problem.cols - 1, labels))
    return np.where(rows % 7 == 4, IGNORED, labels).astype(np.int32)


def _weights(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    weights = rng.standard_normal(problem.rows).astype(np.float32)
    weights[8::13], weights[12::29] = NAN, 0
    return weights


def operands(problem: Problem, seed: int = 0) -> tuple[jax.Array, ...]:
    """The operands of `problem`: logits, or a residual and a tangent; labels, weights; then the mask, if it has one.

    What must not be read of ignored rows is NaN.
    """
    rng = np.random.default_rng(seed)
    x = _rows(problem, rng)
    if problem.op is Op.SOFTMAX_TANGENT:
        with np.errstate(invalid="ignore"):
            x = np.exp(x - x.max(1, keepdims=True))
            x /= x.sum(1, keepdims=True)
    of_rows = []
    if problem.op.has_labels:
        labels = _labels(problem, rng)
        x[labels == IGNORED] = NAN
        of_rows = [labels, _weights(problem, rng)][: len(problem.op.row_operands)]
    if problem.op.takes_stats:
        of_rows[0] = np.where(np.arange(problem.rows) % 4 == 2, problem.cols + labels + 2, labels).astype(np.int32)
        of_rows += _of_whole_rows(problem, x, of_rows[1], rng)
    arrays = [jnp.asarray(x, problem.dtype), *map(jnp.asarray, of_rows)]
    if problem.op.is_linear:
        arrays.append(jnp.asarray(rng.standard_normal(x.shape), problem.dtype))
    if problem.where != "none":
        arrays.append(jnp.asarray(_mask(problem, rng)))
    return tuple(arrays)


def _of_whole_rows(problem: Problem, x: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The factor of the probabilities, the states and the counts of rows of which `x` is a part.

    In the rest of a row logits are smaller, as large, or larger. The factor is NaN where the weight is.
    """
    with np.errstate(all="ignore"):
        z = problem.scale * np.asarray(jnp.asarray(x, problem.dtype)).astype(np.float64)
        z = z if problem.soft_cap is None else problem.soft_cap * np.tanh(z / problem.soft_cap)
        own = z.max(1)
        rest = np.where(own == -np.inf, 0.0, own) + rng.choice((-5.0, 0.0, 5.0), problem.rows)
        maximum = np.maximum(own, rest).astype(np.float32)
        total = np.exp(z - maximum[:, None]).sum(1) + 3 * np.exp(rest - maximum)
    prob_factor = weights * (1 + rng.random(problem.rows).astype(np.float32))
    return [prob_factor, maximum, total.astype(np.float32), np.full(problem.rows, 3 * problem.cols, np.float32)]


def shapes(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of `operands(problem)`."""
    shape = (problem.rows, problem.cols) + ((problem.inner,) if problem.inner > 1 else ())
    arrays = [jax.ShapeDtypeStruct(shape, problem.dtype)] * (2 if problem.op.is_linear else 1)
    dtype = lambda name: jnp.int32 if name == "labels" else jnp.float32
    arrays += [jax.ShapeDtypeStruct((problem.rows,), dtype(name)) for name in problem.op.row_operands]
    mask_shapes = {"none": [], "full": [shape], "shared": [(problem.cols,)]}[problem.where]
    return tuple(arrays + [jax.ShapeDtypeStruct(s, jnp.bool_) for s in mask_shapes])


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at work on a problem."""

    kernel: Any
    problem: Problem
    config: Any

    def run(self, *operands: jax.Array) -> Any:
        return self.kernel.run(self.problem, self.config, *operands)

    def __str__(self) -> str:
        p = self.problem
        configs = self.kernel.configs(p, H200)
        config = (
            configs.index(self.config) if self.config in configs else "_".join(map(str, vars(self.config).values()))
        )
        extras = [f"inner{p.inner}"] * (p.inner > 1) + [f"where_{p.where}"] * (p.where != "none")
        extras += [f"scale{p.scale:g}"] * (p.scale != 1) + [f"cap{p.soft_cap}"] * (p.soft_cap is not None)
        extras += [f"smoothing{p.smoothing:g}"] * (p.smoothing != 0) + [f"z_loss{p.z_loss:g}"] * (p.z_loss != 0)
        return "-".join([self.kernel.name, p.op.value, p.dtype.name, f"{p.rows}x{p.cols}", *extras, f"config{config}"])


def takes(kernel: Any, problem: Problem) -> bool:
    return kernel.unsupported(problem, H200) is None


def default(kernel: Any, problem: Problem) -> Case:
    return Case(kernel, problem, kernel.configs(problem, H200)[0])


def every_config(kernel: Any, problem: Problem) -> list[Case]:
    return [Case(kernel, problem, config) for config in kernel.configs(problem, H200)]


def variations(kernel: Any, op: Op, dtype: jnp.dtype, rows: int, cols: int) -> list[Problem]:
    """The problem's other forms that the kernel takes: masks, scales, few rows, and an axis that is not the last."""
    base = Problem(op, rows, cols, dtype)
    changes: list[dict[str, Any]] = [{"rows": 1}, {"inner": 3}, {"inner": 200}]
    changes += [{"scale": scale} for scale in (0.5, -0.3, 30.0)]
    if not op.is_linear:
        changes += [{"where": "full"}, {"where": "shared", "scale": 0.5}, {"where": "full", "inner": 3}]
    return [p for p in (dataclasses.replace(base, **change) for change in changes) if takes(kernel, p)]


def losses(kernel: Any, op: Op, dtype: jnp.dtype, rows: int, cols: int) -> list[Problem]:
    """The cross entropy's forms that the kernel takes, several of its extras at once in each."""
    base = Problem(op, rows, cols, dtype)
    changes: list[dict[str, Any]] = [
        {"soft_cap": 5.0, "smoothing": 0.1, "z_loss": 0.01, "scale": 0.3},
        {"z_loss": -0.3, "where": "full", "scale": -0.3},
        {"soft_cap": 30.0, "where": "shared"},
        {"smoothing": 0.25},
        {"where": "full", "scale": -0.5},
    ][: 5 if op.takes_stats else 4]
    return [p for p in (dataclasses.replace(base, **change) for change in changes) if takes(kernel, p)]
