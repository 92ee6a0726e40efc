"""Cross entropy and top-k softmax on torch's side, for `peers`: imports no JAX.

"value_and_grad" is what a library does in the fewest passes, so quack's kernel that writes the gradient of the sum;
"value_and_grad_mean" is the mean loss and its gradient by autograd. All but quack have one way for both.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

OPS = ("cross_entropy", "top_k")
_LIGER = {"label_smoothing": "label_smoothing", "z_loss": "lse_square_scale", "logits_soft_cap": "softcap"}


def labels(torch: Any, case: Mapping[str, Any]) -> Any:
    """Random labels; with an `ignore_index`, every second row has that."""
    y = torch.randint(0, case["cols"], (case["rows"],), device="cuda")
    if "ignore_index" in case["options"]:
        y[::2] = case["options"]["ignore_index"]
    return y


def peer(torch: Any, name: str, case: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """What to time, and how its arguments come from a case's operands: copies, as Liger writes over the logits."""
    if case["op"] == "top_k":
        return _top_k(torch, name, case["options"]["k"]), lambda x: (x,)
    loss = _loss(torch, name, case)
    if name == "quack" and case["pass"] == "value_and_grad":
        return _quack_in_one, lambda x, y: (x, y)
    if case["pass"] == "fwd":
        return lambda x, y: loss(x, y, reduction="none"), lambda x, y: (x.clone(), y)

    def value_and_grad(x, y):
        value = loss(x, y, reduction="mean")
        return value, torch.autograd.grad(value, x)[0]

    return value_and_grad, lambda x, y: (x.clone().requires_grad_(), y)


def _top_k(torch: Any, name: str, k: int) -> Callable[..., Any]:
    if name not in ("torch", "torch_compile"):
        raise NotImplementedError(f"{name} has no top-k softmax of such rows")
    select = lambda x: torch.topk(torch.softmax(x, -1), k)
    return select if name == "torch" else torch.compile(select, dynamic=False)


def _quack_in_one(x, y):
    losses, gradient = importlib.import_module("quack.cross_entropy").cross_entropy_fwd(x, y, return_dx=True)
    return losses.sum(), gradient


def _loss(torch: Any, name: str, case: Mapping[str, Any]) -> Callable[..., Any]:
    options = {key: value for key, value in case["options"].items() if key != "ignore_index"}  # -100 is everyone's
    if name == "liger":
        function = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
        named = {_LIGER[key]: value for key, value in options.items()}
        return lambda x, y, reduction: function(x, y, reduction=reduction, **named)
    if options:
        raise NotImplementedError(f"{name} has no {', '.join(options)} together")
    if name == "quack":
        module = importlib.import_module("quack.cross_entropy")
        if case["pass"] == "fwd":
            return lambda x, y, reduction: module.cross_entropy_fwd(x, y)
        return module.cross_entropy
    function = torch.nn.functional.cross_entropy
    return function if name == "torch" else torch.compile(function, dynamic=False)
