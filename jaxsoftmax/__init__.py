"""Softmax, cross entropy, top-k softmax and flash attention for JAX, by Pallas kernels on Hopper GPUs."""

from jaxsoftmax._attention import flash_attention as flash_attention
from jaxsoftmax._attention.checks import logits_memory as logits_memory
from jaxsoftmax._attention.merge import merge_attention as merge_attention
from jaxsoftmax._attention.paged import paged_attention as paged_attention
from jaxsoftmax._attention.sequence import unzigzag as unzigzag
from jaxsoftmax._attention.sequence import zigzag as zigzag
from jaxsoftmax._core.checks import batch_invariant as batch_invariant
from jaxsoftmax._cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxsoftmax._cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from jaxsoftmax._cross_entropy import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from jaxsoftmax._explain import explain as explain
from jaxsoftmax._explain import explain_attention as explain_attention
from jaxsoftmax._explain import explain_linear_cross_entropy as explain_linear_cross_entropy
from jaxsoftmax._explain import explain_paged_attention as explain_paged_attention
from jaxsoftmax._explain.words import Explanation as Explanation
from jaxsoftmax._explain.words import Outside as Outside
from jaxsoftmax._explain.words import ProgramExplanation as ProgramExplanation
from jaxsoftmax._patch import Calls as Calls
from jaxsoftmax._patch import install as install
from jaxsoftmax._patch import patch as patch
from jaxsoftmax._patch import uninstall as uninstall
from jaxsoftmax._softmax import log_normalizer as log_normalizer
from jaxsoftmax._softmax import log_softmax as log_softmax
from jaxsoftmax._softmax import logsumexp as logsumexp
from jaxsoftmax._softmax import merge as merge
from jaxsoftmax._softmax import softmax as softmax
from jaxsoftmax._top_k import top_k_softmax as top_k_softmax
from pallas_kernels.monoid import Stats as Stats

__version__ = "0.1.0"

__all__ = [
    "Calls",
    "Explanation",
    "Outside",
    "ProgramExplanation",
    "Stats",
    "batch_invariant",
    "explain",
    "explain_attention",
    "explain_linear_cross_entropy",
    "explain_paged_attention",
    "flash_attention",
    "install",
    "linear_cross_entropy",
    "log_normalizer",
    "log_softmax",
    "logits_memory",
    "logsumexp",
    "merge",
    "merge_attention",
    "paged_attention",
    "patch",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "top_k_softmax",
    "uninstall",
    "unzigzag",
    "zigzag",
]
