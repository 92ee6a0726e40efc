"""How tests run the binary."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def binary():
    """Runs `python -m benchmarks` on the CPU with these flags, and returns what it prints."""

    def run(*flags, expect=0):
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks", *flags]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
