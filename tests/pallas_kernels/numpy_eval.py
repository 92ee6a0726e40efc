"""Evaluates the programs of simulated warpgroups with NumPy, one operation after the other.

XLA takes a second to compile such a program, which runs for a tenth of that. Most of its operations are arithmetic of
indices. What has no rule here is left to JAX, one operation at a time. `interpreter_shim` adds the rule of callbacks.
"""

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core

Operation = Callable[..., Sequence[Any]]  # what an equation does with its operands' values


class Program:
    """A jaxpr in the form of steps on a list of values, of which constants are there from the start."""

    def __init__(self, jaxpr: core.Jaxpr):
        places: dict[Any, int] = {}
        self._values: list[Any] = []

        def place(atom: Any) -> int:
            if isinstance(atom, core.Literal):
                self._values.append(np.asarray(atom.val, getattr(atom.aval, "dtype", None))[()])
                return len(self._values) - 1
            if atom not in places:
                places[atom] = len(self._values)
                self._values.append(None)
            return places[atom]

        self._arguments = [place(v) for v in (*jaxpr.constvars, *jaxpr.invars)]
        self._steps: list[tuple[Operation, list[int], list[int]]] = []
        for eqn in jaxpr.eqns:
            operation = RULES.get(eqn.primitive.name, _left_to_jax)(eqn)
            self._steps.append((operation, list(map(place, eqn.invars)), list(map(place, eqn.outvars))))
        self._results = [place(v) for v in jaxpr.outvars]

    def __call__(self, *arguments: Any) -> list[Any]:
        values = self._values.copy()
        for place, argument in zip(self._arguments, arguments, strict=True):
            values[place] = argument
        for operation, operands, results in self._steps:
            outputs = operation(*[values[i] for i in operands])
            for place, output in zip(results, outputs, strict=True):
                values[place] = output
        return [values[i] for i in self._results]


_program = functools.lru_cache(maxsize=256)(Program)
_one_at_a_time = threading.RLock()  # the threads of a kernel have one program


def evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], *arguments: Any) -> list[Any]:
    """What the program returns; overflow and NaN are as silent as they are to XLA."""
    with _one_at_a_time:
        program = _program(jaxpr)
    with np.errstate(all="ignore"):
        return program(*map(np.asarray, (*consts, *arguments)))


def results(f: Callable[..., Any], *operands: Any) -> list[np.ndarray]:
    """What `f` returns, where XLA would compile each of its operations for longer than they run."""
    program = jax.make_jaxpr(f)(*operands)
    return list(map(np.asarray, evaluate(program.jaxpr, program.consts, *jax.tree.leaves(operands))))


def _closed(closed: Any) -> Operation:
    return functools.partial(_program(closed.jaxpr), *map(np.asarray, closed.consts))


def _left_to_jax(eqn: Any) -> Operation:
    def run(*values: Any) -> list[Any]:
        results = eqn.primitive.bind(*map(np.asarray, values), **eqn.params)
        return [np.asarray(x) for x in (results if eqn.primitive.multiple_results else [results])]

    return run


def _one(of: Callable[..., Any]) -> Callable[[Any], Operation]:
    """The rule of an operation that has one result and no parameters."""
    return lambda eqn: lambda *values: [of(*values)]


def _divide(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y if x.dtype.kind in "iu" else np.divide(x, y)


def _select(which: Any, *cases: Any) -> Any:
    if which.ndim == 0:
        return cases[int(which)]
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 else np.choose(which, cases)


def _bitcast(eqn: Any) -> Operation:
    dtype = np.dtype(eqn.params["new_dtype"])
    if dtype.itemsize != eqn.invars[0].aval.dtype.itemsize:
        return _left_to_jax(eqn)
    return lambda x: [np.ascontiguousarray(x).reshape(x.shape).view(dtype)]


def _broadcast(eqn: Any) -> Operation:
    shape, kept = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = dict(zip(kept, eqn.invars[0].aval.shape, strict=True))
    aligned = [sizes.get(i, 1) for i in range(len(shape))]
    return lambda x: [np.broadcast_to(np.reshape(x, aligned), shape)]


def _slice(eqn: Any) -> Operation:
    starts, limits, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    part = tuple(map(slice, starts, limits, strides or (None,) * len(starts)))
    return lambda x: [x[part]]


def _dynamic_slice(eqn: Any) -> Operation:
    sizes = eqn.params["slice_sizes"]

    def run(x: Any, *starts: Any) -> list[Any]:
        first = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
        return [x[tuple(slice(s, s + size) for s, size in zip(first, sizes, strict=True))]]

    return run


def _round(eqn: Any) -> Operation:
    if eqn.params["rounding_method"] is not lax.RoundingMethod.TO_NEAREST_EVEN:
        return _left_to_jax(eqn)
    return lambda x: [np.rint(x)]


def _cond(eqn: Any) -> Operation:
    branches = [_closed(b) for b in eqn.params["branches"]]
    return lambda index, *values: branches[min(max(int(index), 0), len(branches) - 1)](*values)


def _while(eqn: Any) -> Operation:
    goes_on, body = _closed(eqn.params["cond_jaxpr"]), _closed(eqn.params["body_jaxpr"])
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]

    def run(*values: Any) -> list[Any]:
        state = list(values[second:])
        while goes_on(*values[:first], *state)[0]:
            state = body(*values[first:second], *state)
        return state

    return run


def _scan(eqn: Any) -> Operation:
    body, length = _closed(eqn.params["jaxpr"]), eqn.params["length"]
    consts, carry, xs = map(len, eqn.params["ft_in"].unpack())
    if xs or len(eqn.outvars) != carry or eqn.params["reverse"]:
        return _left_to_jax(eqn)

    def run(*values: Any) -> list[Any]:
        state = list(values[consts:])
        for _ in range(length):
            state = body(*values[:consts], *state)
        return state

    return run


def _dot_general(eqn: Any) -> Operation:
    """Of matrices, in the precision of the result; XLA sums up in an order of its own."""
    (lefts, rights), _ = eqn.params["dimension_numbers"]
    dtype = eqn.outvars[0].aval.dtype
    if dtype != np.float32 or [x.aval.ndim for x in eqn.invars] != [2, 2] or len(lefts) != 1:
        return _left_to_jax(eqn)
    left, right = *lefts, *rights
    return lambda x, y: [np.moveaxis(x, left, 1).astype(dtype) @ np.moveaxis(y, right, 0).astype(dtype)]


def _iota(eqn: Any) -> Operation:
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    along = [n if d == dimension else 1 for d, n in enumerate(shape)]
    found = np.broadcast_to(np.arange(shape[dimension], dtype=eqn.params["dtype"]).reshape(along), shape)
    return lambda: [found]


def _pad(eqn: Any) -> Operation:
    low, high, inner = zip(*eqn.params["padding_config"], strict=True)
    if any(inner) or min(low + high) < 0:
        return _left_to_jax(eqn)
    return lambda x, value: [np.pad(x, list(zip(low, high, strict=True)), constant_values=value)]


def _cumsum(eqn: Any) -> Operation:
    if eqn.params["reverse"]:
        return _left_to_jax(eqn)
    return lambda x: [np.cumsum(x, eqn.params["axis"], x.dtype)]


def _shift_right_logical(x: Any, by: Any) -> Any:
    return np.right_shift(x.view(f"u{x.itemsize}"), by.view(f"u{x.itemsize}")).view(x.dtype)


def _gather(eqn: Any) -> Operation:
    """`take_along_axis` of a matrix's columns; what lies outside is left to JAX."""
    n, left = eqn.params["dimension_numbers"], _left_to_jax(eqn)
    axes = n.offset_dims, n.collapsed_slice_dims, n.start_index_map, n.operand_batching_dims
    if axes != ((), (1,), (1,), (0,)) or eqn.invars[1].aval.ndim != 3:
        return left

    def run(x: Any, at: Any) -> list[Any]:
        at = at[..., 0]
        inside = at.size == 0 or (at.min() >= 0 and at.max() < x.shape[1])
        return [np.take_along_axis(x, at, 1)] if inside else left(x, at[..., None])

    return run


def _scatter(eqn: Any) -> Operation:
    """Of one number into a vector; what lies outside is left to JAX."""
    left = _left_to_jax(eqn)
    if eqn.invars[0].aval.ndim != 1 or eqn.invars[1].aval.shape != (1,) or eqn.invars[2].aval.ndim:
        return left

    def run(x: Any, at: Any, value: Any) -> list[Any]:
        if not 0 <= at[0] < x.size:
            return left(x, at, value)
        x = x.copy()
        x[at[0]] = value
        return [x]

    return run


RULES: dict[str, Callable[[Any], Operation]] = {
    "add": _one(operator.add),
    "sub": _one(operator.sub),
    "mul": _one(operator.mul),
    "div": _one(_divide),
    "rem": _one(np.fmod),
    "neg": _one(operator.neg),
    "sign": _one(np.sign),
    "abs": _one(np.abs),
    "floor": _one(np.floor),
    "exp": _one(np.exp),
    "max": _one(np.maximum),
    "min": _one(np.minimum),
    "clamp": _one(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "and": _one(np.bitwise_and),
    "or": _one(np.bitwise_or),
    "xor": _one(np.bitwise_xor),
    "not": _one(np.bitwise_not),
    "shift_left": _one(np.left_shift),
    "shift_right_arithmetic": _one(np.right_shift),
    "shift_right_logical": _one(_shift_right_logical),
    "eq": _one(operator.eq),
    "ne": _one(operator.ne),
    "lt": _one(operator.lt),
    "le": _one(operator.le),
    "gt": _one(operator.gt),
    "ge": _one(operator.ge),
    "select_n": _one(_select),
    "optimization_barrier": lambda eqn: lambda *values: values,
    "convert_element_type": lambda eqn: lambda x: [x.astype(eqn.params["new_dtype"])],
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda eqn: lambda x: [np.reshape(x, eqn.params["new_sizes"])],
    "squeeze": lambda eqn: lambda x: [np.squeeze(x, eqn.params["dimensions"])],
    "transpose": lambda eqn: lambda x: [np.transpose(x, eqn.params["permutation"])],
    "stack": lambda eqn: lambda *values: [np.stack(values, eqn.params["axis"])],
    "concatenate": lambda eqn: lambda *values: [np.concatenate(values, eqn.params["dimension"])],
    "reduce_max": lambda eqn: lambda x: [np.max(x, eqn.params["axes"])],
    "reduce_min": lambda eqn: lambda x: [np.min(x, eqn.params["axes"])],
    "reduce_and": lambda eqn: lambda x: [np.bitwise_and.reduce(x, eqn.params["axes"])],
    "reduce_or": lambda eqn: lambda x: [np.bitwise_or.reduce(x, eqn.params["axes"])],
    "reduce_sum": lambda eqn: lambda x: [np.sum(x, eqn.params["axes"], dtype=x.dtype)],
    "cumsum": _cumsum,
    "iota": _iota,
    "pad": _pad,
    "dot_general": _dot_general,
    "gather": _gather,
    "scatter": _scatter,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "round": _round,
    "jit": lambda eqn: _closed(eqn.params["jaxpr"]),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
