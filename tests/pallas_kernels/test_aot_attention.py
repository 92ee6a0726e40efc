"""Attention's kernels, compiled for an H200 without one: also as code for a linker, which JAX from 0.12 on makes."""

import dataclasses
import re

import aot
import attention_cases
import pytest

from pallas_kernels.attention.problem import Op

pytestmark = pytest.mark.skipif(aot.MISSING is not None or not aot.ASSEMBLES, reason=aot.MISSING or "no ptxas")

# What ptxas complains of, by what is put into a kernel in the place of something else.
_PLANTED = {
    "C7504": (r"\n\s*ret;", "\nsetmaxnreg.dec.sync.aligned.u32 24;\nret;"),
    "C751[12]": (r"\.maxntid \d+", ".maxntid 512"),  # 128 registers for each thread
    "[1-9][0-9]* bytes spilled": (r"\.maxntid \d+", ".maxntid 512"),
}


@pytest.mark.parametrize("complaint", _PLANTED)
def test_complaints_about_relocatable_code_are_seen(complaint, monkeypatch):
    p = attention_cases.problem_of(Op.FORWARD, {}, (512, 512), (128, 128), "bfloat16", (2, 2))
    report = attention_cases.compiled(p)
    ptx, count = re.subn(*_PLANTED[complaint], report.ptx)
    assert count
    monkeypatch.setattr(attention_cases, "compiled", lambda *_: dataclasses.replace(report, ptx=ptx))
    with pytest.raises(AssertionError, match=complaint):
        attention_cases.check_compiled(p)
