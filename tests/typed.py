"""What pyright makes of calls: it reads this file, and nothing runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from typing import assert_type

import jax

import jaxsoftmax as js

Pair = tuple[jax.Array, jax.Array]


def pairs(x: jax.Array, labels: jax.Array, flag: bool) -> None:
    assert_type(js.softmax(x), jax.Array)
    assert_type(js.logsumexp(x), jax.Array)
    assert_type(js.logsumexp(x, 1, keepdims=True, return_sign=True), Pair)
    assert_type(js.logsumexp(x, 1, None, True, True), Pair)
    assert_type(js.logsumexp(x, return_sign=flag), jax.Array | Pair)
    assert_type(js.softmax_cross_entropy_with_integer_labels(x, labels), jax.Array)
    assert_type(js.linear_cross_entropy(x, x, labels), jax.Array)
    assert_type(js.linear_cross_entropy(x, x, labels, return_lse=True), Pair)
    assert_type(js.linear_cross_entropy(x, x, labels, return_lse=True, return_entropy=True), tuple[*Pair, jax.Array])
    assert_type(js.linear_cross_entropy(x, x, labels, return_entropy=flag), jax.Array | tuple[jax.Array, ...])
    assert_type(js.softmax_cross_entropy_with_integer_labels(x, labels, return_lse=True), Pair)
    assert_type(js.softmax_cross_entropy_with_integer_labels(x, labels, return_lse=flag), jax.Array | Pair)
    assert_type(js.top_k_softmax(x, 2), Pair)


def names(x: jax.Array) -> None:
    js.softmax(x, implementation="xla")
    js.softmax(x, implementation="cudnn")  # pyright: ignore[reportArgumentType]
    js.top_k_softmax(x, 2, normalize="top_k")
    js.top_k_softmax(x, 2, normalize="some")  # pyright: ignore[reportArgumentType]
