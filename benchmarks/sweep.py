"""Times configs of the ladder's rungs against each other: what `pallas_kernels.softmax.heuristics` stands on.

    python -m benchmarks.sweep --rung=cluster --dtype=bfloat16 --cols=128256,151936 --blocks=4,6,8 --registers=1,2

Every combination of the flags is a job. Processes compile jobs side by side, and one of them times at a time, so that
250 jobs take half a minute. A line for each says the time, the rate of the least traffic, and the copy kernel's.
"""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import timing
from pallas_kernels import hardware
from pallas_kernels.softmax import dispatch
from pallas_kernels.softmax.config import StagedConfig
from pallas_kernels.softmax.problem import Op, Problem

_RUNG = flags.DEFINE_enum("rung", "cluster", ["block", "cluster"], "The rung whose configs to time.")
_OP = flags.DEFINE_list("op", ["softmax"], "Operations.")
_DTYPE = flags.DEFINE_list("dtype", ["bfloat16"], "Dtypes.")
_COLS = flags.DEFINE_list("cols", None, "Lengths of rows.", required=True)
_ROWS = flags.DEFINE_integer("rows", None, "How many rows; as many as make --mib by default.")
_MIB = flags.DEFINE_integer("mib", 512, "The size of an operand.")
_BLOCKS = flags.DEFINE_list("blocks", ["1"], "Blocks to a row.")
_WARPGROUPS = flags.DEFINE_list("warpgroups", ["2"], "Warpgroups to a block.")
_REGISTERS = flags.DEFINE_list("registers", ["2"], "Vectors a thread handles at a time.")
_IN_REGISTERS = flags.DEFINE_list("in_registers", ["0"], "How much of a block's share of a row stands in registers.")
_SPREAD = flags.DEFINE_list("spread", ["0"], "1: what a row's blocks read at a time lies together.")
_SLOTS = flags.DEFINE_list("slots", ["1"], "Rows in a block's shared memory; as many as it takes, or --in_turn more.")
_IN_TURN = flags.DEFINE_integer("in_turn", 1, "Rows to a block for each slot.")
_PROCESSES = flags.DEFINE_integer("processes", 14, "How many processes compile.")


class Job(NamedTuple):
    """A config to time."""

    problem: Problem
    rung: str
    config: StagedConfig

    def __str__(self) -> str:
        p, knobs = self.problem, ", ".join(f"{name} {value}" for name, value in vars(self.config).items())
        return f"{p.op.value} {p.dtype.name} {p.rows} x {p.cols}, {self.rung}: {knobs}"


def jobs() -> Iterator[Job]:
    """What the flags ask for."""
    for op, dtype, cols in itertools.product(_OP.value, _DTYPE.value, map(int, _COLS.value)):
        rows = _ROWS.value or max(_MIB.value * 2**20 // (cols * jnp.dtype(dtype).itemsize), 1)
        problem = Problem(Op(op), rows, cols, jnp.dtype(dtype))
        knobs = (_BLOCKS, _WARPGROUPS, _REGISTERS, _SLOTS, _IN_REGISTERS, _SPREAD)
        for values in itertools.product(*(map(int, flag.value) for flag in knobs)):
            blocks, warpgroups, registers, slots, kept, spread = values
            config = StagedConfig(blocks, warpgroups, registers, slots, slots * _IN_TURN.value, kept, bool(spread))
            if config.staged(problem.max_vectors) > 0:
                yield Job(problem, _RUNG.value, config)


def work(mine: Sequence[Job], lock: str) -> None:
    """Times some of the jobs, holding the file `lock` while it does."""
    for job in mine:
        try:
            print(f"{job}: {_timed(job, lock)}", flush=True)
        except Exception as error:  # a config that cannot run is a result too, and the compiler's errors have no type
            print(f"{job}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)


def _timed(job: Job, lock: str) -> str:
    problem = job.problem
    decision = dispatch.decide(problem, hardware.current(), kernel=job.rung, config=job.config)
    if decision.kernel is None:
        return dict(decision.declined)[job.rung]
    size = problem.elements * problem.dtype.itemsize
    first = _operands(problem, 0)
    run = jax.jit(decision.run).lower(*first).compile()
    buffers = [first, *(_operands(problem, k) for k in range(1, timing.buffers_needed(size, hot=False)))]
    copy = timing.copy_variant(2 * size, len(buffers))
    launches = timing.launches_per_round(problem.least_bytes)
    with _alone(lock):
        ours = timing.Variant("ours", lambda k: run(*buffers[k]))
        clock, times = timing.measure(
            [ours, copy], buffers=len(buffers), rounds=3, launches=launches, device_clock=True
        )
    us, copy_us = times["ours"].median, times[copy.name].median
    rate, copy_rate = problem.least_bytes / us / 1e6, timing.moved_bytes(2 * size) / copy_us / 1e6
    return f"{us:.1f} us, {rate:.2f} TB/s; copy kernel {copy_rate:.2f}; {clock}"


def _operands(problem: Problem, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), problem.operands)
    shape, kinds = (problem.rows, problem.cols), {"labels": jnp.int32, "weights": jnp.float32}
    rows = [jax.random.normal(key, shape, problem.dtype) for key in keys]
    return rows + [jnp.ones(problem.rows, kinds[name]) for name in problem.op.row_operands]


@contextlib.contextmanager
def _alone(lock: str) -> Iterator[None]:
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _main(_: Sequence[str]) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    todo, context = list(jobs()), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        parts = [(todo[k :: _PROCESSES.value], f"{folder}/lock") for k in range(_PROCESSES.value)]
        processes = [context.Process(target=work, args=part) for part in parts if part[0]]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process ended early")


if __name__ == "__main__":
    app.run(_main)
