"""What a case costs at least: bytes through memory, and arithmetic. The axes of the roofline."""

from benchmarks.cases import Case

# Per element, exp counted as one: (scale, subtract, exp, add, multiply) forward; products and sums backward.
_FLOPS = {"softmax": 5, "log_softmax": 5, "logsumexp": 4, "cross_entropy": 4, "top_k": 4}
_BACKWARD_FLOPS = {"softmax": 4, "log_softmax": 6, "cross_entropy": 2}


def least_bytes(case: Case) -> int:
    """The traffic no implementation can go below: every operand read once, every result written once."""
    unread = operand_bytes(case) // 2 if case.variant == "half_ignored" else 0
    return sum(problem.least_bytes for problem in case.problems) - unread


def copied_bytes(case: Case) -> int:
    """The traffic of the copy beside it: as much, and for a loss the logits read and written once."""
    return 2 * operand_bytes(case) if case.op == "cross_entropy" else least_bytes(case)


def operand_bytes(case: Case) -> int:
    """The size of one operand."""
    problem = case.problems[0]
    return problem.elements * problem.dtype.itemsize


def flops(case: Case) -> int:
    """Arithmetic of the algorithm, not of any implementation of it."""
    forward = _FLOPS[case.op] if case.pass_ != "bwd" else 0
    backward = 0 if case.pass_ in ("fwd", "call") else _BACKWARD_FLOPS[case.op]
    return case.rows * case.cols * (forward + backward)
