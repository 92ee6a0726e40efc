"""What is read from a device, and what is taken where a device does not say."""

import types

import jax
import pytest

from pallas_kernels import hardware
from pallas_kernels.hardware import H200, Device


def _gpu(stats, **attributes):
    facts = {"device_kind": "NVIDIA X", "compute_capability": "9.0", "core_count": 114}
    return types.SimpleNamespace(memory_stats=lambda: stats, **facts, **attributes)


@pytest.mark.parametrize(
    "attributes, smem", [({"shared_memory_per_block_optin": 99 * 1024}, 99 * 1024), ({}, H200.smem_per_cta)]
)
@pytest.mark.parametrize("stats, memory", [({"bytes_limit": 7}, 7), ({}, Device.memory), (None, Device.memory)])
def test_the_device_says_what_it_has(monkeypatch, attributes, smem, stats, memory):
    monkeypatch.setattr(jax, "devices", lambda platform: [_gpu(stats, **attributes)])
    assert hardware.present() == Device("NVIDIA X", "9.0", 114, smem, memory)


def test_without_a_device_kernels_are_for_an_h200(monkeypatch):
    def none(platform):
        raise RuntimeError(platform)

    monkeypatch.setattr(jax, "devices", none)
    assert hardware.present() is None
    assert hardware.current() == H200
