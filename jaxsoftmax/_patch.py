"""Replaces functions of JAX, optax and Flax by ours, for models that someone else wrote."""

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

ArrayLike = jax.typing.ArrayLike
Function = Callable[..., Any]


def _dot_product_attention(
    *,
    scale: ArrayLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **given: Any,
) -> Any:
    """`jax.nn.dot_product_attention`, whose residual has no derivative."""
    if scale is not None and jnp.size(scale) != 1:
        raise NotImplementedError("a scale of several numbers multiplies the logits in jax.nn, and the query here")
    given |= {"scale": scale, "implementation": None if implementation == "cudnn" else implementation}
    found = _attention.flash_attention(return_residual=return_residual, **given)
    return (found[0], jax.lax.stop_gradient(found[1])) if return_residual else found


def _flax_attention(*, mask: ArrayLike | None = None, **given: Any) -> jax.Array:
    """Flax's `dot_product_attention`, whose mask may be numbers."""
    given["mask"] = None if mask is None else jnp.not_equal(mask, 0)
    return _attention.flash_attention(**{name: x for name, x in given.items() if x is not None})


def _integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: int | Sequence[int] = -1, where: ArrayLike | None = None
) -> jax.Array:
    """`optax.softmax_cross_entropy_with_integer_labels`, in which negative labels count from the end."""
    x, y = jnp.asarray(logits), jnp.asarray(labels)
    if jnp.issubdtype(y.dtype, jnp.signedinteger):
        y = y.astype(jnp.promote_types(y.dtype, jnp.int32))
        y = jnp.where(y < 0, y + math.prod(x.shape[a] for a in ([axis] if isinstance(axis, int) else axis)), y)
    return _cross_entropy.softmax_cross_entropy_with_integer_labels(x, y, axis, where)


_OF_JAX: dict[str, Function] = {
    "jax.nn.softmax": _softmax.softmax,
    "jax.nn.log_softmax": _softmax.log_softmax,
    "jax.nn.logsumexp": _softmax.logsumexp,
    "jax.nn.dot_product_attention": _dot_product_attention,
    "jax.scipy.special.logsumexp": _softmax.logsumexp,
}
# By the module that defines them.
_OF_LIBRARIES: dict[str, dict[str, Function]] = {
    "optax.losses": {
        "optax.softmax_cross_entropy": _cross_entropy.softmax_cross_entropy,
        "optax.softmax_cross_entropy_with_integer_labels": _integer_labels,
    },
    "flax.linen.attention": {"flax.linen.dot_product_attention": _flax_attention},
}
_NAMES = (*_OF_JAX, *(name for functions in _OF_LIBRARIES.values() for name in functions))

# Modules that hold functions of JAX as attributes, and where these come from.
_HOLDERS = {"jax.nn": "jax.nn", "jax.scipy.special": "jax.scipy.special"} | dict.fromkeys(
    ("flax.core.nn", "flax.linen", "flax.linen.activation", "flax.nnx", "flax.nnx.nn.activations"), "jax.nn"
)


# It is part of the key of JAX's caches: what `jax.jit` has traced under a patch is not used outside, nor vice versa.
_ON = jax.make_user_context(None)


class Calls(dict[str, int]):
    """How many calls of each function ours have taken, by its name, as "jax.nn.softmax".

    Under `jax.jit` a function is called when it is traced: once for each shape, not once for each step.

    Attributes:
        fallbacks: How many calls of each function the original took, because ours does not take such arguments.
        reasons: What ours said to the latest of these.

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


class _Here(threading.local):
    """The counts of a thread's open blocks."""

    def __init__(self) -> None:
        self.calls: list[Calls] = []


_HERE = _Here()
_LOCK = threading.RLock()
_undo = contextlib.ExitStack()
_users = 0  # blocks in all threads, and the installation
_installed: Calls | None = None


@contextlib.contextmanager
def patch() -> Iterator[Calls]:
    """Puts our functions in the place of JAX's, optax's and Flax's, in this thread, until the block ends.

    Inside, `jax.nn.softmax`, `jax.nn.log_softmax`, `jax.nn.logsumexp`, `jax.nn.dot_product_attention`,
    `jax.scipy.special.logsumexp`, `optax.softmax_cross_entropy`, `optax.softmax_cross_entropy_with_integer_labels` and
    `flax.linen.dot_product_attention` are ours, in models built before and in models built inside:

    - Code that looks one of JAX's up when it calls it is served, which Keras, Equinox, rlax, distrax, optax and
      `flax.nnx` do; so are `flax.linen.softmax` and its kin, the same functions under another name.
    - A module that has said `from jax.nn import softmax` before keeps the original. One that says so inside has ours
      inside such blocks, and the original outside.
    - Functions of optax and Flax are served however they are held: as a default, in a layer, under another name.
      Neither library is imported for this; one that is imported inside is served too.
    - A Pallas kernel whose body calls one of these cannot be compiled inside.

    A call that works without the patch works under it, with results of the same dtypes: a loss of bfloat16 logits is
    accumulated in float32 and rounded. A call that fails without it fails under it, with the same error: the original
    is traced first, for the shapes and dtypes of its results. Negative labels count from the end, as in optax.
    `implementation="cudnn"` means None, "xla" means "xla", and the residual of attention is not differentiated. What
    ours does not take, as an einsum for Flax, the original does; `Calls.fallbacks` counts that. One result differs on
    purpose: a query that sees no key gets 0 and a logsumexp of -inf, where `jax.nn` and Flax give the mean of all
    values.

    Blocks nest, and an outer block counts what inner ones do. They hold in their own thread, as JAX's own context
    managers do: other threads call the originals, or are in blocks of their own. What `jax.jit` compiled outside is
    traced anew inside, and the other way round.

    At the end, also by an error, every original is back where it was. A function that someone else has put in such a
    place before is put back as well; one that someone else puts there inside stays.

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


def install() -> Calls:
    """Does what `patch` does, in every thread, until `uninstall` is called.

    Installing again changes nothing. A `patch` block meanwhile counts for itself, and counts here too.

    Returns:
        The counts, the same ones until `uninstall`.

    >>> import jax, jax.numpy as jnp
    >>> calls = install()
    >>> _ = jax.nn.log_softmax(jnp.ones(3))
    >>> uninstall()
    >>> calls["jax.nn.log_softmax"]
    1
    """
    global _installed
    with _LOCK:
        if _installed is None:
            _begin()
            _installed = Calls()
            _ON.set_global(True)
        return _installed


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
            _installed = None
            _ON.set_global(None)
            _end()


class _Substitute:
    """Calls ours under a patch. Elsewhere, and where ours refuses, it calls the original."""

    def __init__(self, name: str, ours: Function, original: Function) -> None:
        functools.update_wrapper(self, original)
        self._name, self._ours, self._original = name, ours, original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
                if refusal is None:
                    calls[self._name] += 1
                else:
                    calls.fallbacks[self._name] += 1
                    calls.reasons[self._name] = f"{type(refusal).__name__}: {refusal}"
        return result

    def _expected(self, bound: inspect.BoundArguments) -> Any:
        """The shapes and dtypes of the original's results; its error, if it refuses the arguments."""
        given = bound.arguments
        if "module" in given:  # what is sown while this is traced would be of no use outside
            given["module"] = None
        if given.get("implementation") == "cudnn":  # XLA's way takes the same, on any machine
            given["implementation"] = None
        with _ON(False):
            return jax.eval_shape(lambda: self._original(*bound.args, **bound.kwargs))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method, where a class holds it, as a function would be."""
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Function, tuple[str]]:
        """Pickled as the name, which gives the original wherever there is no patch."""
        module, _, attribute = self._name.rpartition(".")
        return pkgutil.resolve_name, (f"{module}:{attribute}",)


def _like(result: Any, expected: Any) -> Any:
    """The result in the dtypes that are expected."""
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (result, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the result has the shape {shapes[0][0]}, and the original's {shapes[1][0]}")
    return jax.tree.map(lambda x, like: x.astype(like.dtype), result, expected)


_ORIGINALS = {name: operator.attrgetter(name.removeprefix("jax."))(jax) for name in _OF_JAX}
_SUBSTITUTES = {name: (_Substitute(name, ours, _ORIGINALS[name]), _ORIGINALS[name]) for name, ours in _OF_JAX.items()}


class _Importer(importlib.abc.MetaPathFinder):
    """An import hook that patches modules imported under a patch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _HOLDERS and fullname not in _OF_LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                with _LOCK:
                    if _users:
                        _reach(module, _undo)

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
                for name in (*_HOLDERS, *_OF_LIBRARIES):
                    if name in sys.modules:
                        _reach(sys.modules[name], undo)
                _undo = undo.pop_all()
        _users += 1


def _end() -> None:
    """Restores everything if no other block or installation is left."""
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            _undo.close()


def _reach(module: types.ModuleType, undo: contextlib.ExitStack) -> None:
    """Replaces the functions that a module holds."""
    name = module.__name__
    for function, (substitute, original) in _SUBSTITUTES.items():
        origin, _, attribute = function.rpartition(".")
        held = vars(module).get(attribute)
        # Elsewhere a function of the same name may be another one.
        if name == origin or (_HOLDERS.get(name) == origin and held in (original, substitute)):
            # A module that was imported under the patch has found the substitute.
            undo.callback(_put_back, module, attribute, original if held is substitute else held, substitute)
            setattr(module, attribute, substitute)
    for function, ours in _OF_LIBRARIES.get(name, {}).items():
        _redirect(getattr(module, function.rpartition(".")[2]), function, ours, undo)


def _put_back(module: types.ModuleType, attribute: str, found: Any, substitute: Any) -> None:
    """Restores an attribute, unless someone else has set it since."""
    if vars(module).get(attribute) is substitute:
        setattr(module, attribute, found)


def _forward(*args: Any, _to: Function, **kwargs: Any) -> Any:
    """The new code of functions that are redirected."""
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
