"""Calls of all public functions raise errors in the function's own name, which know others' words."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType

# Advice, which begins with the name of a parameter, for the words that torch, FlashAttention, optax, Flax, Keras, vLLM,
# FlashInfer, Liger and JAX's own kernels have for it. The first that the function has is meant.
WORDS: dict[str, tuple[str, ...]] = {
    "axis": ("dim", "dims", "axes", "along", "vocab_axis", "seq_axis", "sequence_axis"),
    "keepdims": ("keepdim", "keep_dims"),
    "b": ("weights", "weight"),
    "where": ("mask", "attn_mask", "attention_mask", "token_mask", "padding_mask", "loss_mask", "valid"),
    "mask (True where a key is seen)": ("where", "attn_mask", "attention_mask", "padding_mask", "attn_bias_mask"),
    "mask=~key_padding_mask[:, None, None, :]": ("key_padding_mask",),
    "bias": ("attn_bias", "attention_bias", "ab", "alibi", "alibi_slopes", "position_bias", "score_bias"),
    "is_causal": ("causal", "use_causal_mask", "causal_mask", "is_casual"),
    "local_window_size": ("window", "window_size", "sliding_window", "sliding_window_size", "attention_window"),
    "local_window_size=window_left": ("window_left", "window_size_left"),
    "scale": ("sm_scale", "softmax_scale", "scaling", "logit_scale", "logits_scale", "scale_factor", "beta"),
    "scale=1 / temperature": ("temperature", "temp", "tau"),
    "logits_soft_cap": (
        *("softcap", "soft_cap", "softcapping", "logit_cap", "logits_cap", "logit_softcap", "logit_soft_cap"),
        *("logits_softcap", "attn_logits_soft_cap", "attn_logit_softcapping", "final_logit_softcap"),
        "final_logit_softcapping",
    ),
    "sinks": ("sink", "softmax_aux", "attention_sinks", "attention_sink", "s_aux", "learnable_sink"),
    "query_segment_ids": ("segment_ids", "q_segment_ids", "segments", "segment_pos", "document_ids", "cu_seqlens"),
    "query_segment_ids (a number for each sequence that is packed)": ("cu_seqlens_q", "cu_seq_lens_q", "qo_indptr"),
    "key_value_segment_ids": ("kv_segment_ids", "k_segment_ids", "key_segment_ids", "cu_seqlens_k", "cu_seqlens_kv"),
    "query_positions": ("positions", "position_ids", "q_positions", "q_pos", "q_position_ids"),
    "key_value_positions": ("kv_positions", "key_positions", "k_positions", "kv_pos", "k_pos"),
    "query_seq_lengths": ("query_lengths", "q_lengths", "q_lens", "q_seqlen", "q_seq_lens", "seqused_q"),
    "key_value_seq_lengths": (
        *("key_value_lengths", "key_lengths", "kv_lengths", "kv_lens", "kv_seqlen", "kv_seq_lens", "seq_lens"),
        *("seq_lengths", "lengths", "cache_seqlens", "seqused_k", "key_seq_lengths", "valid_len"),
    ),
    "lengths": (
        *("seq_lens", "seq_lengths", "context_lens", "context_lengths", "kv_lens", "kv_lengths", "cache_seqlens"),
        *("key_value_seq_lengths", "sequence_lengths", "seqused_k"),
    ),
    "block_tables": ("block_table", "page_indices", "page_table", "page_tables", "kv_indices", "kv_page_indices"),
    "key_pages": ("k_pages", "key_cache", "k_cache", "key", "k"),
    "value_pages": ("v_pages", "value_cache", "v_cache", "value", "v"),
    "layout": ("kv_layout", "page_layout", "cache_layout"),
    "query": ("q", "queries"),
    "key": ("k", "keys"),
    "value": ("v", "values"),
    "dropout_rate": ("dropout_p", "dropout", "dropout_prob", "p_dropout", "attention_dropout", "p"),
    "dropout_rng": ("dropout_key", "rng", "rngs", "prng_key", "dropout_seed", "seed"),
    "deterministic=not training": ("training", "train", "is_training"),
    "deterministic_gradients": ("deterministic_backward", "deterministic_bwd"),
    "return_residual": (
        *("return_lse", "return_residuals", "return_logsumexp", "return_attn_probs", "return_softmax_lse"),
        *("save_residuals", "return_softmax"),
    ),
    "return_lse": ("return_residual", "return_residuals", "return_logsumexp", "return_z", "return_z_loss"),
    "z_loss": ("lse_square_scale", "z_loss_weight", "z_loss_multiplier", "z_loss_coeff", "lse_scale", "z_weight"),
    "label_smoothing": ("smoothing", "label_smooth", "alpha", "epsilon", "eps"),
    "ignore_index": ("ignored_index", "ignore_label", "ignore_labels", "padding_idx", "pad_id", "pad_token_id"),
    "weights": ("sample_weight", "sample_weights", "loss_weights", "token_weights", "loss_scale", "weight"),
    "weights=class_weights[labels]": ("class_weights", "class_weight"),
    "labels": ("label", "target", "targets", "y", "y_true", "integer_labels", "one_hot", "probs"),
    "hidden": ("x", "e", "input", "inputs", "hidden_states", "embeddings", "logits"),
    "weight": ("w", "c", "kernel", "lm_head", "classifier", "linear_weight", "head", "table"),
    "weight_layout": ("layout", "transposed", "transpose", "vocab_first"),
    "chunk_size": ("chunk", "chunks", "num_chunks", "n_chunks", "block_size", "token_chunk_size", "batch_size"),
    "logits": ("x", "input", "inputs", "a", "pred", "preds", "y_pred", "operand", "scores", "predictions"),
    "x": ("input", "inputs", "logits", "a", "array", "tensor", "operand"),
    "a": ("x", "input", "inputs", "logits", "operand"),
    "k": ("top_k", "topk", "num", "n", "num_experts", "experts_per_token"),
    'normalize="top_k"': ("renormalize", "norm_topk_prob", "renorm"),
    "implementation": ("impl", "backend", "method", "attention_impl", "attn_implementation", "use_pallas", "kernel"),
    "reduction": ("reduce", "size_average", "reduction_fn"),
    "precision": ("lax_precision", "matmul_precision"),
    "devices": ("num_devices", "n_devices", "shards", "num_shards", "world_size", "ring_size", "cp_size"),
    "device": ("gpu", "hardware", "card", "arch", "platform", "accelerator"),
    "enabled": ("enable", "on", "mode"),
}  # fmt: skip
# Advice for words that stand for no parameter.
REMARKS: dict[str, tuple[str, ...]] = {
    "The result has a loss for each row: take its .mean() or .sum().": (
        *("reduction", "reduce", "size_average", "reduction_fn"),
    ),
    "Heads that share keys need no argument.": ("enable_gqa", "num_kv_heads", "num_key_value_heads", "num_heads"),
    "How a kernel divides its work is chosen by this package.": (
        *("block_sizes", "block_q", "block_k", "block_kv", "block_m", "block_n", "block_b", "num_warps", "num_stages"),
        *("pages_per_compute_block", "num_splits", "interpret", "debug", "config"),
    ),
    "The result has the dtype of what is passed: convert that, or the result, by .astype().": (
        *("dtype", "out_dtype", "out", "preferred_element_type"),
    ),
    "Each result is a new array.": ("inplace", "inplace_backward", "out"),
    "The largest come first, always.": ("sorted", "largest"),
    "Pass integers as labels, or probabilities to softmax_cross_entropy.": ("num_classes", "from_logits", "depth"),
}
# The ends of the operations that `explain` and its like know, for what others call them.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "vjp": ("grad", "gradient", "gradients", "backward", "bwd", "reverse", "value_and_grad", "pullback"),
    "gradient": ("grad", "gradients", "backward", "bwd", "reverse", "value_and_grad", "vjp"),
    "jvp": ("tangent", "forward_mode", "linearize", "jacfwd", "fwd_grad", "pushforward"),
    "forward": ("fwd", "primal", "attention", "flash_attention", "linear_cross_entropy", "inference"),
    "cross_entropy": ("softmax_cross_entropy_with_integer_labels", "softmax_cross_entropy", "loss", "ce", "nll"),
    "top_k": ("top_k_softmax", "topk", "router"),
}

_NAMES: set[str] = set()


def public[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes all errors of a public function begin with its name, and say what an unknown keyword probably meant.

    It checks what is either True or False, too.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # `is_causal` may be data.
    flags = {word: at for at, (word, p) in enumerate(parameters.items()) if type(p.default) is bool}
    flags.pop("is_causal", None)
    first = min(flags.values(), default=len(parameters))
    _NAMES.add(name)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if len(args) > first or not flags.keys().isdisjoint(kwargs):
                for word, at in flags.items():
                    _check_flag(name, word, args[at] if at < len(args) else kwargs.get(word, False))
            return function(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:
            unknown = [] if takes_any else [word for word in kwargs if word not in parameters]
            if unknown:
                hint = meant(unknown[0], parameters)
                raise TypeError(f"{name}: got an unexpected keyword argument {unknown[0]!r}.{hint}") from None
            _check_meshes(name, list(parameters), args, kwargs)
            # One public function calls another: `explain` what it explains, `paged_attention` attention.
            who, colon, text = str(error.args[0] if error.args else "").partition(": ")
            if colon and who != name and who in _NAMES:
                hints = (meant(word, parameters) for word in kwargs if text.endswith(f"keyword argument {word!r}."))
                error.args = (f"{name}: {text}{''.join(hints)}", *error.args[1:])
            raise

    return call


def _check_flag(function: str, name: str, value: object) -> None:
    if not isinstance(value, (int, np.bool_)):
        raise TypeError(
            f"{function}: {name} is {value!r}, expected True or False, known when the call is traced. If it is traced, "
            "make it a static argument of jax.jit."
        )


def _check_meshes(function: str, words: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raises if what failed is a call of arrays on different meshes of explicit axes, of which no program has two."""
    first: tuple[str, Mapping[str, int]] | None = None
    for name, x in _arrays(words, args, kwargs):
        mesh = getattr(getattr(jax.typeof(x) if isinstance(x, jax.Array) else x, "sharding", None), "mesh", None)
        if mesh is None or AxisType.Explicit not in mesh.axis_types:
            continue
        first = first or (name, mesh.shape)
        if mesh.shape != first[1]:
            got, wanted = (", ".join(f"{axis!r}: {n}" for axis, n in shape.items()) for shape in (mesh.shape, first[1]))
            raise ValueError(
                f"{function}: {name} is on a mesh of axes {got}, expected the mesh of {first[0]}, of axes {wanted}. "
                "Put it there by jax.device_put."
            ) from None


def _arrays(words: Sequence[str], args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Finds the arguments that may be arrays, and their names."""
    given = [*zip(words, args, strict=False), *kwargs.items()]
    if len(args) > len(words):  # the last takes any number
        given[len(words) - 1] = (words[-1], args[len(words) - 1 :])
    for word, value in given:
        if isinstance(value, (tuple, list)):
            paths = jax.tree.leaves_with_path(value)
            yield from ((word + jax.tree_util.keystr(path), x) for path, x in paths if isinstance(x, jax.Array))
        else:
            yield word, value


def meant(word: str, parameters: Collection[str]) -> str:
    """Says what an unknown keyword probably stands for, with a space before the sentence; empty if nothing is known."""
    for advice, words in WORDS.items():
        if word.lower() in words and re.match(r"\w+", advice)[0] in parameters:  # type: ignore[index]
            return f" Did you mean {advice}?"
    for remark, words in REMARKS.items():
        if word.lower() in words:
            return f" {remark}"
    return did_you_mean(difflib.get_close_matches(word, parameters, 1))


def did_you_mean(words: Collection[str]) -> str:
    """Asks whether one of these words was meant, with a space before the question; empty if there are no words."""
    return f" Did you mean {' or '.join(words)}?" if words else ""


def meant_operation(word: str, among: Collection[str]) -> str:
    """Works as `meant`, for the name of an operation."""
    ends = tuple(end for end, words in OPERATIONS.items() if word.lower() in words)
    names = [name for name in among if ends and name.endswith(ends)] or difflib.get_close_matches(word, among)
    return did_you_mean([repr(name) for name in names])
