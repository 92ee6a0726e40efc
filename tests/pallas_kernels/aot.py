"""Compiles kernels to machine code for an H200 on a machine without a GPU, and reports what ptxas says of them.

Needs `jax-cuda13-plugin` and `jax-cuda13-pjrt` (installed without their dependencies), no driver and no device.
"""

import atexit
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MISSING = "jax-cuda13-plugin is not installed" if importlib.util.find_spec("jax_cuda13_plugin") is None else None
DISASSEMBLES = all(shutil.which(tool) for tool in ("ptxas", "nvdisasm"))

_TARGET = pathlib.Path(__file__).with_name("h200.txtpb")
_dump = pathlib.Path(tempfile.mkdtemp(prefix="mosaic-"))
atexit.register(shutil.rmtree, _dump, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Report:
    """What one kernel needs of a streaming multiprocessor: bytes and registers per thread, `smem` per block."""

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem: int
    threads: int
    ptx: str
    ptxas_log: str

    @property
    def complaints(self) -> list[str]:
        """Lines of the log that say that the compiler gave up on something the kernel asked for."""
        return [line for line in self.ptxas_log.splitlines() if re.search("setmaxnreg|serializ|C75", line)]

    @property
    def shares_scratch(self) -> bool:
        """Whether several warpgroups reduce through one place in shared memory.

        Mosaic gives a reduction across a warpgroup's warps its scratch at a fixed address, the same for every
        warpgroup, and orders it by a barrier of that warpgroup alone: silently wrong, and invisible to the interpreter.
        What is read there after another wait is something else's.
        """
        after_own_barrier = False
        for line in self.ptx.splitlines():
            if re.search(r"bar\.sync|barrier\.sync|try_wait", line):
                after_own_barrier = re.search(r"bar\.sync\s+\S+, 128;", line) is not None
            if after_own_barrier and re.search(r"ld\.shared.*\[__dynamic_shmem__0", line) and self.threads > 128:
                return True
        return False


def compile_for_h200(f: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> tuple[Report, ...]:
    """Compiles `f` and reports on each Mosaic kernel in it."""
    for old in _dump.iterdir():
        old.unlink()
    jax.jit(lambda *args: f(*args)).lower(*on_h200(operands)).compile()
    return tuple(_report(log) for log in sorted(_dump.glob("*.ptxas")))


def machine_code(report: Report) -> str:
    """What ptxas makes of a kernel; its own instructions' order is not that of PTX."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        ptx.write_text(report.ptx)
        subprocess.run(["ptxas", "-arch=sm_90a", ptx, "-o", cubin], check=True)
        return subprocess.run(["nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout


def on_h200(operands: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """The same operands, placed on the GPU that is not there."""
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_h200()) for x in operands]


@functools.cache
def _h200() -> NamedSharding:
    # The variables are read once, when the compiler is first used.
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(_dump)
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET.read_text(), topology="1x1x1")
    return NamedSharding(Mesh(np.array(topology.devices), ("device",)), PartitionSpec())


@functools.cache
def two_gpus() -> Mesh:
    """Two H200, along the axis `d`."""
    _h200()
    topology = topologies.get_topology_desc(platform="cuda", target_config=_TARGET.read_text(), topology="1x2x1")
    return Mesh(np.array(topology.devices), ("d",))


def _report(log_file: pathlib.Path) -> Report:
    log, ptx = log_file.read_text(), log_file.with_suffix(".ptx").read_text()
    module = log_file.with_suffix(".after_layout_inference.txt").read_text()

    def largest(pattern: str, text: str = log) -> int:
        return max((int(n) for n in re.findall(pattern, text)), default=0)

    return Report(
        name=log_file.stem,
        registers=largest(r"Used (\d+) registers"),
        spill_bytes=largest(r"(\d+) bytes spill stores"),
        stack_bytes=largest(r"(\d+) bytes stack frame"),
        smem=largest(r"dynamic_shared_memory_size %c(\d+)_i32", module),
        threads=largest(r"\.maxntid (\d+)", ptx),
        ptx=ptx,
        ptxas_log=log,
    )
