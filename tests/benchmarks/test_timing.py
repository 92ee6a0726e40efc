"""The protocol: what is launched in which order, and which kernel's time goes to whom."""

import types

import jax
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from benchmarks import protocol, runner

KERNELS = {"one": [("a", 1.0)], "two": [("b", 2.0), ("c", 3.0)]}


class FakeDevice:
    """Records launches; stands in for the profiler, which needs a GPU."""

    def __init__(self, monkeypatch):
        self.launches, self.sessions = [], 0
        self.variants = [
            protocol.Variant(name, lambda k, name=name: self.launches.append((name, k))) for name in KERNELS
        ]
        monkeypatch.setattr(profiler, "measure", self.measure)

    def measure(self, schedule, *, aggregate):
        assert not aggregate
        assert isinstance(schedule, jax.stages.Wrapped)

        def wrapper():
            self.sessions += 1
            schedule()
            seen = len(self.launches)
            result = schedule()
            return result, self.kernels([name for name, _ in self.launches[seen:]])

        return wrapper

    def kernels(self, launched):
        return [kernel for name in launched for kernel in KERNELS[name]]

    def time(self, **overrides):
        return protocol.measure(
            self.variants, **{"buffers": 3, "rounds": 2, "launches": 2, "device_clock": True} | overrides
        )


def test_device_time_goes_to_the_variant_that_launched_the_kernel_while_buffers_rotate(monkeypatch):
    device = FakeDevice(monkeypatch)
    clock, timings = device.time()
    assert clock == "cupti"
    assert timings["one"].rounds == [[1000.0, 1000.0], [1000.0, 1000.0]]
    assert timings["two"].rounds == [[5000.0, 5000.0], [5000.0, 5000.0]]
    assert timings["two"].kernels == ["b", "c"]
    assert device.sessions == 3  # one to learn each variant's kernels, one for the whole schedule
    names, buffers = zip(*device.launches[-8:], strict=True)
    assert names == ("one", "one", "two", "two", "two", "two", "one", "one")
    assert buffers == (0, 1, 2, 0, 1, 2, 0, 1)


@pytest.mark.parametrize(
    "alone, together, clock",
    [
        pytest.param(list, lambda found: found[1:], "cupti, each round apart", id="lost kernel"),
        pytest.param(list, lambda found: [*found, ("stray", 1.0)], "cupti, each round apart", id="stray kernel"),
        pytest.param(list, lambda found: found[::-1], "cupti, each round apart", id="kernels out of order"),
        pytest.param(lambda found: [], lambda found: [], "wall", id="no kernel"),
    ],
)
def test_kernels_in_doubt_are_measured_apart_and_without_a_profile_by_wall_clock(monkeypatch, alone, together, clock):
    device = FakeDevice(monkeypatch)
    kernels = device.kernels
    device.kernels = lambda launched: (alone if len(set(launched)) == 1 else together)(kernels(launched))
    with pytest.warns(UserWarning, match="no time by cupti"):
        found, timings = device.time()
    assert found == clock
    assert clock == "wall" or timings["two"].rounds == [[5000.0], [5000.0]]
    assert timings["one"].kernels == []


def test_statistics_are_of_all_launches():
    result = protocol.Timing([[1.0, 2.0], [3.0, 4.0], [100.0, 5.0]]).as_json()
    assert (result["us"], result["min_us"], result["max_us"], result["launches"]) == (3.5, 1.0, 100.0, 6)
    assert result["rounds_us"] == [1.5, 3.5, 52.5]
    shuffled = np.random.default_rng(0).permutation(np.arange(101.0)).reshape(101, 1).tolist()
    shares = protocol.Timing(shuffled).as_json()
    assert {name: shares[f"{name}us"] for name in ("min_", "p20_", "", "p80_", "max_")} == {
        "min_": 0.0, "p20_": 20.0, "": 50.0, "p80_": 80.0, "max_": 100.0,
    }  # fmt: skip


def test_the_copy_probe_moves_what_it_says_and_the_best_is_the_fastest_by_bandwidth():
    variant = runner.copy_variant(10**6, buffers=2)
    assert 2 * variant.launch(1).nbytes == runner.moved_bytes(10**6) <= 10**6
    best = runner.best_copy({"copy:mosaic": (100.0, 4 * 10**8), "copy:torch": (99.0, 3 * 10**8)})
    assert (best["method"], best["tb_per_s"]) == ("copy:mosaic", 4.0)
    assert best["all_tb_per_s"] == {"copy:mosaic": 4.0, "copy:torch": 3.0303}
    assert [protocol.launches_per_round(size) for size in (2**20, 2**34)] == [10, 2]


def test_the_ceiling_of_rows_is_the_faster_of_torchs_copies_before_and_after(monkeypatch, rows):
    case, bench = rows("softmax_fwd_f16_32768x1024"), types.SimpleNamespace(on_gpu=True, _launches=lambda case: 1)
    bench.options = types.SimpleNamespace(rounds=1)
    timing = protocol.Timing([[100.0]])
    monkeypatch.setattr(runner, "copy_variant", lambda size, buffers: protocol.Variant("copy:mosaic", None))
    monkeypatch.setattr(protocol, "measure", lambda variants, **_: ("cupti", {v.name: timing for v in variants}))
    for copies, us in (((50.0, 70.0), 50.0), ((70.0, 50.0), 50.0), ((None, 60.0), 60.0), ((None, None), 100.0)):
        left = list(copies)
        monkeypatch.setattr(runner, "torch_copy_us", lambda *_, left=left, **__: left.pop(0))
        _, _, ceilings = runner.Bench._time(bench, case, [], 1)
        assert ceilings["copy"]["us"] == us
        assert ceilings["copy"]["method"] == ("copy:mosaic" if copies == (None, None) else "copy:torch")
