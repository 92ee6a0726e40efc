"""Torch's side of `benchmarks.linear`: Liger's and quack's losses of `hidden @ weight`, as `torch_peers` measures."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import torch_peers

_BLOCK = 1024  # tokens whose logits are in memory for the check
_ALLOWED = 0.01  # relative error of the mean loss

Case = Mapping[str, Any]


class LinearCall:
    """A case of `benchmarks.linear`; the weight is `[vocabulary, embedding]`, as the peers have it."""

    ceiling, buffers, refusals = "products", 1, (NotImplementedError, AssertionError)

    def __init__(self, torch: Any, case: Case):
        self.torch, self.moving = torch, case["moving"]
        m, e, v = (case[name] for name in ("tokens", "embedding", "vocabulary"))
        draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.hidden, self.weight = draw((m, e)), draw((v, e)) * (3 / e**0.5)
        self.labels = torch.randint(0, v, (m,), device="cuda")

    def checked(self, name: str) -> tuple[dict[str, Any], dict[str, Callable[[int], Any]]]:
        loss = _loss(name)
        arrays = {n: getattr(self, n).detach().requires_grad_(n in self.moving) for n in ("hidden", "weight")}

        def launch(_: int) -> Any:
            value = loss(arrays["hidden"], arrays["weight"], self.labels)
            return value, self.torch.autograd.grad(value, [arrays[n] for n in self.moving]) if self.moving else ()

        true, found = self._mean_loss(), float(launch(0)[0])
        error = abs(found - true) / true
        if error <= _ALLOWED:
            return {"status": "ok", "error": error}, {"": launch}
        return {"status": "WRONG", "error": error, "reason": f"relative error {error:.2e}, allowed {_ALLOWED}"}, {}

    def _mean_loss(self) -> float:
        total = 0.0
        for start in range(0, len(self.labels), _BLOCK):
            block = slice(start, start + _BLOCK)
            logits = (self.hidden[block] @ self.weight.T).float()
            total += float(self.torch.nn.functional.cross_entropy(logits, self.labels[block], reduction="none").sum())
        return total / len(self.labels)

    def probe(self) -> Callable[[int], Any]:
        """As many bare products, with the same results."""
        h, w, count = self.hidden, self.weight, 1 + len(self.moving)
        g = self.torch.randn((len(h), len(w)) if self.moving else (1, 1), device="cuda", dtype=h.dtype)
        each = [lambda: h @ w.T, lambda: g @ w, lambda: g.T @ h]

        def launch(_: int) -> None:
            for product in each[:count]:  # no result is kept, as two would not fit beside JAX's process
                product()

        return launch

    def graphed(self, name: str) -> bool:
        return False

    def rate(self, probe: dict[str, Any]) -> dict[str, Any]:
        return probe

    def speeds(self, times: Mapping[str, dict[str, Any]], probe: Mapping[str, Any]) -> dict[str, Any]:
        (taken,) = times.values()
        return taken


def _loss(name: str) -> Callable[..., Any]:
    """The mean loss of hidden states, a weight and labels."""
    if name == "quack":
        return importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy


if __name__ == "__main__":
    measure = functools.partial(torch_peers.measure, call_of=LinearCall)
    torch_peers.serve(measure, sys.argv[1].split(","), int(sys.argv[2]))
