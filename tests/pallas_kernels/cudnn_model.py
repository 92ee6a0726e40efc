"""What cuDNN does with the calls that `pallas_kernels/attention/cudnn.py` makes, as NumPy reads their configs.

Only what the config says is done: a mask that is not in it, or not in the bias, hides nothing.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.problem import Op


def ffi_call(target: str, results: Any, *, legacy_backend_config: str, **layout: Any) -> Any:
    """Stands in for `jax.ffi.ffi_call`."""
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    assert layout["custom_call_api_version"] == 2
    assert results[-1].shape == (0,)
    kind = target.removeprefix("__cudnn$fmha")
    op = Op.BACKWARD if kind.endswith("Backward") else Op.FORWARD
    has_bias = {"Softmax": False, "ScaleBiasSoftmax": True}[kind.removesuffix("Backward")]
    by_length = [tuple(x) == (0, 2, 1, 3) for x in layout["output_layouts"]]
    assert by_length[:3] == ([True] * 3 if op is Op.BACKWARD else [True, False, False])

    def call(*operands: jax.Array) -> list[jax.Array]:
        given = [np.asarray(x).astype(np.float32) for x in operands]
        found = (_backward if op is Op.BACKWARD else _forward)(config, has_bias, given)[: len(results) - 1]
        found = [jnp.asarray(x).astype(y.dtype) for x, y in zip(found, results, strict=False)]
        assert [x.shape for x in found] == [y.shape for y in results[:-1]]
        return [*found, jnp.zeros(0, jnp.uint8)]

    return call


def _logits(config: dict[str, Any], q: np.ndarray, k: np.ndarray, rest: list[np.ndarray], has_bias: bool) -> np.ndarray:
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    dimensions = [int(n) for n in config["intermediate_tensor_shape"]["dimensions"]]
    assert dimensions == [q.shape[0], q.shape[2], queries, keys]
    z = config["fmha_scale"] * np.einsum("btnh,bsnh->bnts", q, np.repeat(k, group, 2))
    assert config["fmha_scale"] > 0
    if has_bias:
        bias = rest.pop(0)
        assert bias.shape[2:] == (queries, keys)
        assert all(n in (1, m) for n, m in zip(bias.shape, z.shape, strict=True))
        z = z + bias
    i, j = np.arange(queries)[:, None], np.arange(keys)
    hidden = np.zeros(z.shape, bool)
    if "CAUSAL" in config["mask_type"]:
        hidden |= j > i
    if window := config["sliding_window_length"]:
        assert "CAUSAL" in config["mask_type"]
        assert queries <= keys
        hidden |= j <= i - window
    if "PADDING" in config["mask_type"]:
        of_queries, of_keys = (x[:, None, None, None] for x in rest[-2:])
        assert (of_queries > 0).all()
        assert (of_keys > 0).all()
        hidden |= (i >= of_queries) | (j >= of_keys)
    return np.where(hidden, -np.inf, z)


def _forward(config: dict[str, Any], has_bias: bool, given: list[np.ndarray]) -> list[np.ndarray]:
    q, k, v, *rest = given
    z = _logits(config, q, k, rest, has_bias)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = z.max(-1, keepdims=True)
        weights = np.exp(z - top)
        total = weights.sum(-1, keepdims=True)
        lse = (top + np.log(total))[..., 0]
        p = weights / total  # NaN for a row of which all is hidden
    return [np.einsum("bnts,bsnd->bntd", p, np.repeat(v, q.shape[2] // k.shape[2], 2)), lse]


def _backward(config: dict[str, Any], has_bias: bool, given: list[np.ndarray]) -> list[np.ndarray]:
    q, k, v, stats, d_out, *rest = given
    bias, rest = rest[: int(has_bias)], rest[int(has_bias) :]
    out, lengths = rest[0], rest[1:]
    group = q.shape[2] // k.shape[2]
    p = np.exp(_logits(config, q, k, [*bias, *lengths], has_bias) - stats[..., None])
    # Without a mask a half tile past the last key has logits of 0, times 0.
    reads_past = k.shape[1] % 128 == 64 and config["mask_type"] == "NO_MASK"
    assert not reads_past or (stats > -88).all()
    delta = np.einsum("btnd,btnd->bnt", d_out, out)
    d_z = p * (np.einsum("btnd,bsnd->bnts", d_out, np.repeat(v, group, 2)) - delta[..., None])
    fewer = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3).transpose(0, 2, 1, 3)
    d_scores = config["fmha_scale"] * d_z
    found = [
        np.einsum("bnts,bsnh->bnth", d_scores, np.repeat(k, group, 2)),
        fewer(np.einsum("bnts,btnh->bsnh", d_scores, q)),
        fewer(np.einsum("bnts,btnd->bsnd", p, d_out)),
    ]
    if has_bias:
        axes = tuple(d for d in range(4) if bias[0].shape[d] != d_z.shape[d])
        found.append(d_z.sum(axes, keepdims=True))
    return found
