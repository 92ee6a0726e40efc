"""What no attention kernel takes."""

from pallas_kernels.attention.problem import Attention

DTYPES = ("float16", "bfloat16")


def declines_any(problem: Attention, *, widest: int) -> str | None:
    """Why a kernel for heads up to `widest` does not take the problem, whichever it is."""
    if problem.dtype.name not in DTYPES:
        return f"kernels take {' and '.join(DTYPES)}; the operands are {problem.dtype.name}"
    for name in ("head_dim", "value_dim"):
        size = getattr(problem, name)
        if not 0 < size <= widest or size % 8:
            return f"the kernel takes {name} up to {widest} in multiples of 8; it is {size}"
    if 0 in (problem.batch, problem.query_heads, problem.query_length, problem.key_length):
        return "there is nothing to do"
    return None
