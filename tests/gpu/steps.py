"""Steps that a sanitizer watches: `steps N`, then each one's name and `done`, which is what sanitize.sh counts."""

import argparse
from collections.abc import Callable, Sequence


def part_of[Step](chosen: Sequence[Step], part: str) -> Sequence[Step]:
    """Every N-th step from the I-th on, I from 1 (`part` is I/N), so that the parts take about as long."""
    i, n = map(int, part.split("/"))
    if not 1 <= i <= n:
        raise ValueError(f"no part {part}")
    return chosen[i - 1 :: n]


def main(selected: Sequence[tuple[str, Callable[[], object]]], description: str | None) -> None:
    """Takes the steps of the part that the command line names; `--only=NAME` those whose name has it.

    `--after=N`: goes on after the first N of them, in the output of an earlier process.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", default="")
    parser.add_argument("--after", type=int, default=0)
    arguments = parser.parse_args()
    chosen = part_of([step for step in selected if arguments.only in step[0]], arguments.part)
    if not arguments.after:
        print(f"steps {len(chosen)}", flush=True)
    for i, (name, step) in list(enumerate(chosen))[arguments.after :]:
        print(f"{i + 1}/{len(chosen)} {name}", flush=True)
        step()
        print("done", flush=True)
