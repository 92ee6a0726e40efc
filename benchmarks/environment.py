"""Where and with what a run was made: the header of every result file."""

import datetime
import importlib.metadata
import pathlib
import platform
import subprocess
import sys
from typing import Any

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "numpy",
    "torch",
    "triton",
    "nvidia-cudnn-cu13",
    "nvidia-nvjitlink",
    "tokamax",
    "quack-kernels",
    "liger-kernel",
)
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"


def header(*, commit: str | None, seed: int, rounds: int) -> dict[str, Any]:
    """Device, driver, versions, commit, seed, clocks and time."""
    return {
        "schema": 1,
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _git_commit(),
        "device": _device(),
        "clocks_before": clocks(),
        "versions": {"python": platform.python_version(), **_versions()},
        "inputs": "standard normal",
        "seed": seed,
        "rounds": rounds,
        "argv": sys.argv[1:],
    }


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the clocks now; empty without it."""
    return _nvidia_smi(_CLOCKS)


def loaded(library: str) -> str | None:
    """The file of a shared library that this process has loaded, by the beginning of its name."""
    try:
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return next((path for path in paths if pathlib.Path(path).name.startswith(library)), None)


def _device() -> dict[str, str]:
    found = _nvidia_smi("name,driver_version,memory.total")
    return found or {"name": f"CPU ({platform.machine()})"}


def _nvidia_smi(query: str) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(query.split(","), (field.strip() for field in line.split(",")), strict=False))


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    root = pathlib.Path(__file__).parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
