"""What the dispatchers choose for calls at and around their figures. `choices.txt` is written by running this file.

No result depends on a choice, so that only its record shows one that changed by mistake. A change that is meant comes
with the measurements behind it, and with this file's difference.
"""

import dataclasses
import itertools
import pathlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import attention_cases
import jax.numpy as jnp

from pallas_kernels.attention import dispatch as attention_dispatch
from pallas_kernels.attention.problem import Op as AttentionOp
from pallas_kernels.decision import Decision
from pallas_kernels.hardware import H200
from pallas_kernels.softmax import dispatch
from pallas_kernels.softmax.problem import Op, Problem

RECORD = pathlib.Path(__file__).with_suffix(".txt")

KIB = 1024
DTYPES = ("bfloat16", "float16", "float32")
ROWS = (1, 16, 17, 131, 132, 527, 528, 1055, 1056, 2111, 2112, 65536)
COLS = (1, 7, 8, 31, 64, 128, 136, 143, 200, 255, 256, 257, 300, 512)
ROW_KIB = (
    1, 4, 8, 16, 19, 28, 48, 60, 64, 108, 120, 150, 180, 197, 216, 256, 300, 450, 512, 700, 1024, 2048, 2560, 4096,
    16384, 2**16, 2**18,
)  # fmt: skip
LENGTHS = (
    1, 2, 7, 12, 13, 16, 17, 63, 64, 65, 128, 129, 200, 384, 512, 1000, 1024, 1025, 2048, 4096, 8192, 8193, 32768,
)  # fmt: skip
DIMS = ((32, 32), (64, 64), (64, 64), (96, 96), (128, 128), (128, 128), (192, 128), (192, 192), (256, 256), (80, 128))
HEADS = ((1, 1), (4, 4), (8, 2), (8, 1), (6, 2), (32, 4), (64, 1), (128, 8), (16, 16))
BATCHES = (1, 1, 2, 3, 8, 40, 133)
OPTIONS: tuple[dict[str, Any], ...] = (
    *({},) * 6, {"batch_invariant": True}, {"deterministic": True}, {"soft_cap": 30.0}, {"cap": True},
    {"window_sizes": True}, {"page_size": 16, "key_lengths": True}, {"page_size": 128, "key_lengths": True},
)  # fmt: skip


def row_problems() -> Iterator[tuple[Problem, str | None]]:
    """Problems, and the kernel that is asked for."""
    draw, ops, plain = random.Random(0), list(Op), (Op.SOFTMAX, Op.LOG_SOFTMAX)
    sizes = [
        (kib * KIB + more, name) for kib, more, name in itertools.product(ROW_KIB, (0, 16), DTYPES) for _ in range(6)
    ]
    sizes += [(draw.choice(COLS) * jnp.dtype(name).itemsize, name) for name in DTYPES for _ in range(60)]
    for size, name in sizes:
        op, dtype = draw.choice(plain if draw.random() < 0.4 else ops), jnp.dtype(name)
        cols = max(size // dtype.itemsize // (2 if op.is_linear else 1) + draw.choice((0, 0, 0, 0, 0, 0, 0, 1, -1)), 1)
        where = "none" if op.is_linear else draw.choice(("none",) * 8 + ("full", "shared"))
        problem = Problem(op, draw.choice(ROWS), cols, dtype, where=where, batch_invariant=draw.random() < 0.1)
        kernel = draw.choice(list(dispatch.KERNELS)) if draw.random() < 0.1 else None
        taken = kernel is None or dispatch.KERNELS[kernel].unsupported(problem, H200) is None
        yield problem, kernel if taken else None
    # Rows in just as many bytes as decide.
    yield Problem(Op.STATS, 1, 31772, jnp.dtype("float32"), batch_invariant=True), None
    for rows, cols in ((128, 2**19), (131, 513024), (132, 2**19 - 4), (40, 2**18), (40, 2**18 + 4)):
        yield Problem(Op.SOFTMAX, rows, cols, jnp.dtype("float32")), None


def _more_row_problems() -> Iterator[Problem]:
    """Plain rows of as many bytes as decide, and others of any number of vectors of 16 bytes."""
    draw = random.Random(1)
    for kib, name in itertools.product(ROW_KIB, DTYPES):
        dtype = jnp.dtype(name)
        yield Problem(Op.SOFTMAX, 65536, kib * KIB // dtype.itemsize, dtype)
    sizes = [16 * vectors for vectors in range(1, 65) for _ in range(4)]
    sizes += [kib * KIB + draw.randrange(64) * 16 for kib in (*range(1, 400), *range(400, 2400, 5))]
    for size, name in itertools.product(sizes, DTYPES):
        op, dtype = draw.choice(list(Op)), jnp.dtype(name)
        cols = max(size // dtype.itemsize // (2 if op.is_linear else 1) + draw.choice((0, 0, 0, 1)), 1)
        yield Problem(op, draw.choice(ROWS), cols, dtype)


def attention_problems(drawn: range = range(800)) -> Iterator[Any]:
    heads_of = HEADS, (*HEADS, (4, 2), (12, 2), (20, 4))
    for i in drawn:
        draw = random.Random(i)
        op, plain = draw.choice(list(AttentionOp)), draw.random() < 0.4
        kind = {} if plain else draw.choice(list(attention_cases.KINDS.values()))
        options = draw.choice(OPTIONS) | {"bias_gradient": "bias" in kind and op is AttentionOp.BACKWARD}
        lengths, dims = (draw.choice(LENGTHS), draw.choice(LENGTHS)), draw.choice(DIMS)
        heads = draw.choice(heads_of[i >= 800])
        dtype = draw.choice(("bfloat16", "float16"))
        yield attention_cases.problem_of(op, kind | options, lengths, dims, dtype, heads, draw.choice(BATCHES))
    # Sequences that each have their own number of keys.
    for keys, batch in itertools.product((960, 1000, 1024, 1984, 4096, 32768), (2, 40)):
        shape = (1, keys), (128, 128), "bfloat16", (8, 2), batch
        yield attention_cases.problem_of(AttentionOp.FORWARD, {"key_lengths": True}, *shape)


def record() -> str:
    """The text of `choices.txt`: a call, what runs it, in how many other configs it could, and what rows move."""
    decisions = [dispatch.decide(problem, H200, kernel=kernel) for problem, kernel in row_problems()]
    decisions += [attention_dispatch.decide(problem, H200) for problem in attention_problems()]
    return "".join([*(_line(decision) + "\n" for decision in decisions), *_digests()])


def _digests() -> Iterator[str]:
    """Of more calls than fit in a file, the configs of all that were drawn alike, in their order, as one number."""
    lines: dict[str, list[str]] = {}
    for problem in _more_row_problems():
        ladder = dispatch.priority(problem, H200)
        configs = [dispatch.KERNELS[name].configs(problem, H200) for name in ladder]
        lines.setdefault(f"rows of {problem.dtype}", []).append(f"{_fields(problem)}: {ladder} {configs}")
    for problem in attention_problems(range(800, 3000)):
        decision = attention_dispatch.decide(problem, H200)
        configs = decision.chosen.configs(problem, H200) if decision.chosen else ()
        width = next(n for n in (64, 128, 256) if problem.widest <= n)
        kind = f"attention, {problem.op.name.lower()}, heads up to {width}"
        lines.setdefault(kind, []).append(f"{_line(decision)} {configs}")
    for kind, found in sorted(lines.items()):
        yield f"{len(found)} more of {kind}: {zlib.crc32(''.join(found).encode()):08x}\n"


def _line(of: Decision) -> str:
    chosen = f"{of.kernel} {_fields(of.config) if of.config else ''}".strip()
    others = len(of.chosen.configs(of.problem, of.device)) - 1 if of.chosen else 0
    moved = "" if of.bytes_moved is None else f", {of.bytes_moved} bytes"
    return f"{_fields(of.problem)}: {chosen}{f' +{others}' if others else ''}{moved}"


def _fields(x: Any) -> str:
    """The fields that have no default, and those that differ from theirs by name."""
    found = []
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if field.default is dataclasses.MISSING:
            found.append(str(value))
        elif value != field.default and field.name not in ("scale", "bias_dtype"):
            found.append(f"{field.name}={value}".replace(" ", ""))
    return " ".join(found)


if __name__ == "__main__":
    RECORD.write_text(record())
