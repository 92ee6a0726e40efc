"""Replaces functions of JAX, optax and Flax by ours, for models that someone else wrote."""

import atexit
import collections
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import math
import operator
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special

from jaxsoftmax import _attention, _cross_entropy, _softmax
from jaxsoftmax._core.calls import public
from jaxsoftmax._core.checks import ArrayLike

Function = Callable[..., Any]


def _dot_product_attention(
    *,
    scale: ArrayLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **given: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `jax.nn.dot_product_attention`, whose residual has no derivative."""
    if scale is not None and jnp.size(scale) != 1:
        raise NotImplementedError("a scale of several numbers multiplies the logits in jax.nn, and the query here")
    given |= {"scale": scale, "implementation": None if implementation == "cudnn" else implementation}
    if not return_residual:
        return _attention.flash_attention(**given)
    out, lse = _attention.flash_attention(return_residual=True, **given)
    return out, jax.lax.stop_gradient(lse)


def _logmeanexp(
    x: ArrayLike, axis: int | Sequence[int] | None = None, where: ArrayLike | None = None, keepdims: bool = False
) -> jax.Array:
    """Computes `jax.nn.logmeanexp`."""
    lse = _softmax.logsumexp(x, axis, keepdims=keepdims, where=where)
    count = jnp.broadcast_to(True if where is None else where, jnp.shape(x)).sum(axis, lse.dtype, keepdims=keepdims)
    return lse - jnp.log(count)


def _flax_attention(*, mask: ArrayLike | None = None, **given: Any) -> jax.Array:
    """Computes Flax's `dot_product_attention`, whose mask may be numbers."""
    given["mask"] = None if mask is None else jnp.not_equal(mask, 0)
    return _attention.flash_attention(**{name: x for name, x in given.items() if x is not None})


def _integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: int | Sequence[int] = -1, where: ArrayLike | None = None
) -> jax.Array:
    """Computes `optax.softmax_cross_entropy_with_integer_labels`, in which negative labels count from the end."""
    x, y = jnp.asarray(logits), jnp.asarray(labels)
    if jnp.issubdtype(y.dtype, jnp.signedinteger):
        y = y.astype(jnp.promote_types(y.dtype, jnp.int32))
        y = jnp.where(y < 0, y + math.prod(x.shape[a] for a in ([axis] if isinstance(axis, int) else axis)), y)
    return _cross_entropy.softmax_cross_entropy_with_integer_labels(x, y, axis, where)


_OF_JAX: dict[str, Function] = {
    "jax.nn.softmax": _softmax.softmax,
    "jax.nn.log_softmax": _softmax.log_softmax,
    "jax.nn.logmeanexp": _logmeanexp,
    "jax.nn.logsumexp": _softmax.logsumexp,
    "jax.nn.dot_product_attention": _dot_product_attention,
    "jax.scipy.special.softmax": functools.partial(_softmax.softmax, axis=None),
    "jax.scipy.special.log_softmax": functools.partial(_softmax.log_softmax, axis=None),
    "jax.scipy.special.logsumexp": _softmax.logsumexp,
}
# By the module that defines them.
_OF_LIBRARIES: dict[str, dict[str, Function]] = {
    "optax.losses": {
        "optax.softmax_cross_entropy": _cross_entropy.softmax_cross_entropy,
        "optax.softmax_cross_entropy_with_integer_labels": _integer_labels,
    },
    "flax.linen.attention": {"flax.linen.dot_product_attention": _flax_attention},
    "flax.nnx.nn.attention": {"flax.nnx.dot_product_attention": _flax_attention},
}
_NAMES = (*_OF_JAX, *(name for functions in _OF_LIBRARIES.values() for name in functions))

# These packages keep the originals: JAX's own code, and ours, which calls them.
_KEPT = ("jax", "jaxlib", "jaxsoftmax", "pallas_kernels")


# It is part of the key of JAX's caches: what `jax.jit` has traced under a patch is not used outside, nor vice versa.
_ON = jax.make_user_context(None)


class Calls(dict[str, int]):
    """Counts the calls of each function that ours have taken, by its name, as "jax.nn.softmax".

    Under `jax.jit` a function is called when it is traced: once for each shape, not once for each step.

    Attributes:
        fallbacks: How many calls of each function the original took, because ours does not take such arguments.
        reasons: The error by which ours declined the latest of these.
        callers: By the module that called, how many calls of each function ours have taken.

    >>> import jax, jax.numpy as jnp
    >>> with patch() as calls:
    ...     _ = jax.nn.softmax(jnp.ones(3)), jax.nn.softmax(jnp.ones(3))
    >>> calls["jax.nn.softmax"], calls.fallbacks["jax.nn.softmax"]
    (2, 0)
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(_NAMES, 0))
        self.fallbacks = dict.fromkeys(_NAMES, 0)
        self.reasons: dict[str, str] = {}
        self.callers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def count(self, name: str, caller: str, refusal: Exception | None) -> None:
        """Counts a call, which ours took or refused."""
        if refusal is None:
            self[name] += 1
            self.callers[caller][name] += 1
        else:
            self.fallbacks[name] += 1
            self.reasons[name] = f"{type(refusal).__name__}: {refusal}"

    def report(self) -> str:
        """Lists the calls that ours took and left, by module, and the modules that had nothing but a softmax.

        A module that computes attention or a loss by itself calls softmax alone: its matrix products, and what they
        write, are as they were.

        >>> import jax, jax.numpy as jnp
        >>> with patch() as calls:
        ...     _ = jax.nn.dot_product_attention(*[jnp.ones((2, 3, 4))] * 3)
        >>> print(calls.report().partition(": ")[2])
        jax.nn.dot_product_attention 1
        """
        lines = []
        for caller, counts in sorted(self.callers.items()):
            alone = all(name.endswith(("softmax", "exp")) for name in counts)
            taken = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
            lines.append(f"{caller}: {taken}" + (" (softmax only: no attention, no loss)" if alone else ""))
        lines += [f"left to {name}, {n}: {self.reasons[name]}" for name, n in self.fallbacks.items() if n]
        return "\n".join(lines) or "jaxsoftmax.patch: no call"


class _Here(threading.local):
    """Holds the counts of a thread's open blocks."""

    def __init__(self) -> None:
        self.calls: list[Calls] = []


_HERE = _Here()
_LOCK = threading.RLock()
_undo = contextlib.ExitStack()
_users = 0  # blocks in all threads, and the installation
_installed: Calls | None = None
_reports = False  # whether its end prints what it counted


@public
@contextlib.contextmanager
def patch(*, report: bool = False) -> Iterator[Calls]:
    """Puts our functions in the place of JAX's, optax's and Flax's, in this thread, until the block ends.

    Inside, `jax.nn.softmax`, `log_softmax`, `logsumexp`, `logmeanexp` and `dot_product_attention`, `softmax`,
    `log_softmax` and `logsumexp` of `jax.scipy.special`, `optax.softmax_cross_entropy`,
    `optax.softmax_cross_entropy_with_integer_labels` and `dot_product_attention` of `flax.linen` and `flax.nnx` are
    ours, in models built before and in models built inside:

    - Code that looks one of JAX's up when it calls it is served, and so is a module that has said
      `from jax.nn import softmax`, before or inside, under whatever name.
    - Functions of optax and Flax are served however they are held: as a default, in a layer, under another name.
      Neither library is imported for this; one that is imported inside is served too.
    - Other holders of one of JAX's functions keep it: a layer, a `functools.partial`, a `jax.jit` or `jax.vmap` of it
      that was made before, and JAX's own code.
    - A Pallas kernel whose body calls one of these cannot be compiled inside.

    A call that works without the patch works under it, with results of the same dtypes: a loss of bfloat16 logits is
    accumulated in float32 and rounded. A call that fails without it fails under it, with the same error: the original
    is traced first, for the shapes and dtypes of its results. Negative labels count from the end, as in optax.
    `implementation="cudnn"` means None, "xla" means "xla", and the residual of attention is not differentiated. The
    original takes calls that ours does not take, as with an einsum for Flax; `Calls.fallbacks` counts these. One result
    differs on purpose: a query that sees no key gets 0 and a logsumexp of -inf, where `jax.nn` and Flax give the mean
    of all values.

    Blocks nest, and an outer block counts what inner ones do. They hold in their own thread, as JAX's own context
    managers do: other threads call the originals, or are in blocks of their own. A function that `jax.jit` compiled
    outside is traced anew inside, and the other way round.

    At the end, also by an error, every original is back where it was. A function that someone else has put in such a
    place before is put back as well; one that someone else puts there inside stays.

    Args:
        report: Whether to print `Calls.report` to the standard error at the end.

    Yields:
        The counts, which stay readable after the block.

    >>> import jax, jax.numpy as jnp
    >>> model = jax.jit(lambda x: jax.nn.softmax(x).sum())
    >>> with patch() as calls:
    ...     total = model(jnp.ones(4)) + model(jnp.ones(4))
    >>> calls["jax.nn.softmax"]  # traced once
    1
    """
    calls = Calls()
    _begin()
    _HERE.calls.append(calls)
    try:
        with _ON(True):
            yield calls
    finally:
        _HERE.calls = [others for others in _HERE.calls if others is not calls]
        _end()
        if report:
            print(calls.report(), file=sys.stderr)


@public
def install(*, report: bool = False) -> Calls:
    """Does what `patch` does, in every thread, until `uninstall` is called or the program ends.

    Installing again changes nothing. A `patch` block meanwhile counts for itself, and counts here too.

    Args:
        report: Whether to print `Calls.report` to the standard error at the end.

    Returns:
        The counts, the same ones until `uninstall`.

    >>> import jax, jax.numpy as jnp
    >>> calls = install()
    >>> _ = jax.nn.log_softmax(jnp.ones(3))
    >>> uninstall()
    >>> calls["jax.nn.log_softmax"]
    1
    """
    global _installed, _reports
    with _LOCK:
        if _installed is None:
            _begin()
            _installed = Calls()
            _ON.set_global(True)
            _reports = report
            atexit.register(uninstall)
        return _installed


@public
def uninstall() -> None:
    """Undoes `install`, as the end of a block undoes `patch`; without an `install` it does nothing.

    >>> import jax
    >>> before = jax.nn.softmax
    >>> _ = install()
    >>> uninstall()
    >>> jax.nn.softmax is before
    True
    """
    global _installed
    with _LOCK:
        if _installed is not None:
            if _reports:
                print(_installed.report(), file=sys.stderr)
            _installed = None
            _ON.set_global(None)
            _end()


class _Substitute:
    """Calls ours under a patch. Elsewhere, and where ours refuses, it calls the original."""

    def __init__(self, name: str, ours: Function, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._name, self._ours, self._original = name, ours, original
        self._signature = inspect.signature(original)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not _ON.value:
            return self._original(*args, **kwargs)
        refusal = None
        try:
            bound = self._signature.bind(*args, **kwargs)
            given = dict(bound.arguments)
            expected = self._expected(bound)
        except Exception as error:  # whatever the original raises, or only when it is traced
            refusal = error
        else:
            try:
                result = _like(self._ours(**given), expected)
            except (TypeError, ValueError, NotImplementedError) as error:
                refusal = error
        if refusal is not None:
            result = self._original(*args, **kwargs)
        with _LOCK:
            for calls in [*_HERE.calls, *([] if _installed is None else [_installed])]:
                calls.count(self._name, _caller(), refusal)
        return result

    def _expected(self, bound: inspect.BoundArguments) -> object:
        """Returns the shapes and dtypes of the original's results; its error, if it refuses the arguments."""
        given = bound.arguments
        if "module" in given:  # what is sown while this is traced would be of no use outside
            given["module"] = None
        if given.get("implementation") == "cudnn":  # XLA's way takes the same, on any machine
            given["implementation"] = None
        with _ON(False):
            return jax.eval_shape(lambda: self._original(*bound.args, **bound.kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        """Makes a method, where a class holds it, as a function would."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Function, tuple[str]]:
        """Pickles the name, which gives the original wherever there is no patch."""
        module, _, attribute = self._name.rpartition(".")
        return pkgutil.resolve_name, (f"{module}:{attribute}",)


def _like(result: object, expected: object) -> object:
    """Converts the result to the dtypes that are expected."""
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (result, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the result has the shape {shapes[0][0]}, and the original's {shapes[1][0]}")
    return jax.tree.map(lambda x, like: x.astype(like.dtype), result, expected)


_ORIGINALS = {name: operator.attrgetter(name.removeprefix("jax."))(jax) for name in _OF_JAX}
_SUBSTITUTES = {name: (_Substitute(name, ours, _ORIGINALS[name]), _ORIGINALS[name]) for name, ours in _OF_JAX.items()}


_TO_OURS = {id(original): substitute for substitute, original in _SUBSTITUTES.values()}
_TO_ORIGINALS = {id(substitute): original for substitute, original in _SUBSTITUTES.values()}


def originals() -> dict[tuple[str, str], str]:
    """Returns the names of the functions that ours can replace, by the file and the name of their code."""
    functions = dict(_ORIGINALS)
    for module, names in _OF_LIBRARIES.items():
        if module in sys.modules:
            functions |= {name: getattr(sys.modules[module], name.rpartition(".")[2]) for name in names}
    by_code: dict[tuple[str, str], str] = {}
    for name, function in functions.items():
        code = inspect.unwrap(function).__code__
        by_code.setdefault((code.co_filename, code.co_qualname), name)
    return by_code


def _caller() -> str:
    """Returns the module whose code called a substitute."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        # A redirected function of the library runs our code.
        if module.partition(".")[0] not in _KEPT and frame.f_code is not _forward.__code__:
            return module
        frame = frame.f_back
    return "unknown"


class _Importer(importlib.abc.MetaPathFinder):
    """Redirects functions of libraries that are imported under a patch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _OF_LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                with _LOCK:
                    if _users:
                        _redirect_all(module, _undo)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _begin() -> None:
    """Patches every module that is imported, unless another block or installation has done so."""
    global _undo, _users
    with _LOCK:
        if _users == 0:
            with contextlib.ExitStack() as undo:
                importer = _Importer()
                sys.meta_path.insert(0, importer)
                undo.callback(sys.meta_path.remove, importer)
                for name, (substitute, original) in _SUBSTITUTES.items():
                    module, _, attribute = name.rpartition(".")
                    _put(sys.modules[module], attribute, substitute, original, undo)
                for name in _OF_LIBRARIES.keys() & sys.modules.keys():
                    _redirect_all(sys.modules[name], undo)
                _replace(_TO_OURS)
                # Modules that are imported under the patch find substitutes.
                undo.callback(_replace, _TO_ORIGINALS)
                _undo = undo.pop_all()
        _users += 1


def _end() -> None:
    """Restores everything if no other block or installation is left."""
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            _undo.close()


def _replace(by_id: dict[int, Function]) -> None:
    """Replaces what modules hold as globals."""
    for name, module in list(sys.modules.items()):
        # By its type: a module that is imported lazily is imported by a question about it.
        if name.partition(".")[0] not in _KEPT and issubclass(type(module), types.ModuleType):
            held = object.__getattribute__(module, "__dict__")
            if not by_id.keys().isdisjoint(map(id, list(held.values()))):
                held |= {attribute: by_id[id(x)] for attribute, x in held.items() if id(x) in by_id}


def _put(
    module: types.ModuleType, attribute: str, substitute: Function, original: Function, undo: contextlib.ExitStack
) -> None:
    """Sets an attribute of a module of JAX's, whatever it is, and restores that unless someone else sets it since."""
    held = getattr(module, attribute)
    before = original if held is substitute else held  # someone else has put a substitute back

    def restore() -> None:
        if getattr(module, attribute) is substitute:
            setattr(module, attribute, before)

    undo.callback(restore)
    setattr(module, attribute, substitute)


def _redirect_all(module: types.ModuleType, undo: contextlib.ExitStack) -> None:
    """Redirects the functions that a module of a library defines."""
    for function, ours in _OF_LIBRARIES[module.__name__].items():
        _redirect(getattr(module, function.rpartition(".")[2]), function, ours, undo)


def _forward(*args: object, _to: Function, **kwargs: object) -> object:
    """Calls ours; this is the new code of functions that are redirected."""
    return _to(*args, **kwargs)


def _redirect(function: types.FunctionType, name: str, ours: Function, undo: contextlib.ExitStack) -> None:
    """Replaces a function's code, which reaches every reference to it: defaults of classes, layers, other modules."""
    if function.__code__ is _forward.__code__:  # restored by code that saved it under an earlier patch
        original = vars(function)["__wrapped__"]
    else:
        original = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__

    def restore() -> None:
        if function.__code__ is _forward.__code__:
            function.__code__, function.__kwdefaults__ = original.__code__, original.__kwdefaults__
            del vars(function)["__wrapped__"]

    undo.callback(restore)
    # `inspect` shows the signature of what is wrapped, by which Flax chooses what to pass.
    vars(function)["__wrapped__"] = original
    function.__kwdefaults__ = {"_to": _Substitute(name, ours, original)}
    function.__code__ = _forward.__code__
