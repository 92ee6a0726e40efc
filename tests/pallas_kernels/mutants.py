"""Prints `docs/mutants.md`: every planted fault, and what the tests notice of faults that a tool makes."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "pallas_kernels")]

import attention_mutants  # noqa: E402
import row_mutants  # noqa: E402

from tests import mutation  # noqa: E402
from tests.jaxsoftmax import mutants  # noqa: E402

DOCUMENT = ROOT / "docs" / "mutants.md"
KERNELS = (*row_mutants.TABLES, *attention_mutants.TABLES)

# Faults that only a kernel can have: (what it is, how it is planted, the test in which it is rejected).
HARNESS_FAULTS = (
    ("no barrier before the cluster's exchange", "toy kernel without its first cluster barrier",
     "test_interpreter.py: race detected"),
    ("no barrier before the block's exchange", "toy kernel without its named barrier",
     "test_interpreter.py: race detected"),
    ("a barrier that not all reach", "toy kernel in which one CTA of two arrives",
     "test_interpreter.py: deadlock reported"),
    ("two blocks write one row", "toy kernel whose blocks overlap", "test_interpreter.py: race detected"),
    ("reads past the last row or column", "toy kernel without its row guard, or shifted",
     "test_interpreter.py: IndexError"),
    ("two warpgroups reduce through one scratch", "toy kernel with a sum across warps and two warpgroups",
     "test_aot.py: seen in the PTX; the interpreter cannot"),
    ("lanes keep sums of their own, which may differ in the last bit",
     "`row_scalars.of_first_lane` of block, cluster, online, grid left out",
     "test_aot.py: seen in the PTX; the interpreter has no lanes"),
    ("registers spill", "toy kernel with too long a row", "test_aot.py: ptxas reports it"),
    ("code for a linker loses registers, spills, or runs its products one by one",
     "an attention kernel's PTX with `setmaxnreg`, or with 512 threads",
     "test_aot_attention.py: `ptxas -c` reports it"),
    ("rows left unwritten", "toy kernel that stops early, on a GPU", "test_gpu_harness.py: poison comes through"),
    ("writes past the output", "toy kernel shifted by a row, on a GPU", "test_gpu_harness.py: a neighbour changed"),
    ("another implementation ran", "`jax.nn.softmax` in the kernel's place",
     "test_gpu_harness.py: no Mosaic call in the HLO"),
)  # fmt: skip


def document() -> str:
    """The text of `docs/mutants.md`."""
    sections = {table.title: list(table.lines()) for table in (*KERNELS, *mutants.TABLES)}
    toys = [f"- {words}: {planted} ({killer})" for words, planted, killer in HARNESS_FAULTS]
    sections |= {"Toy kernels, by the test in brackets": toys}
    texts = [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items()]
    return "\n\n".join([_HEAD, *texts, _mutation()])


_HEAD = """# Planted faults

Each fault below is planted, and a test must reject it. A line names the fault, the function that it is planted in, and
the call that shows it. `tests/pallas_kernels/mutants.py` writes this page."""


def _mutation() -> str:
    """The section on faults that a tool makes."""
    unseen = mutation.scores(unseen=True)
    last = unseen["all"]
    scores = "\n".join(
        f"| {name} | {x.sample} | {x.equivalent} | {x.killed} | {x.share:.1%} | {new.killed} of "
        f"{new.sample - new.equivalent} |"
        for name, x in mutation.scores().items()
        for new in [unseen[name]]
    )
    return f"""## Faults that a tool makes

`make mutants` applies operators of [cosmic-ray](https://cosmic-ray.readthedocs.io) to the modules of index arithmetic,
choices and checks, one place at a time, and runs the tests that `tests/mutation.toml` names for the module. It draws a
sample of each module's mutants, every time with the same seed; mutants that do not import do not count. The score is
the share that is killed of the mutants that are not equivalent to the module. After each part of the sample, tests were
written for the faults that had survived. A part's score on its first trial therefore says more of other mutants: 61 %
of the first 120 mutants, 83 % of the next 123, and {last.share:.1%} of the last part.
`tests/mutation.toml` names the survivors, each with the reason why it may survive.

| module | mutants | equivalent | killed | score | last part, first trial |
|---|---|---|---|---|---|
{scores}
"""


if __name__ == "__main__":
    DOCUMENT.write_text(document())
