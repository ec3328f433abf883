from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.emulation.device_model import DeviceModel
from sf_core.config import EmulationConfig

MODEL = DeviceModel(EmulationConfig())
DURATIONS: dict[str, Callable[[DeviceModel, int], float]] = {
    "prefill": lambda model, n: model.prefill_s(n),
    "decode by batch": lambda model, n: model.decode_s(n, 1000),
    "decode by context": lambda model, n: model.decode_s(8, n),
    "train": lambda model, n: model.train_s(n),
}
SETTINGS = st.builds(
    EmulationConfig,
    peak_flops=st.floats(1e9, 1e16),
    memory_bandwidth=st.floats(1e9, 1e13),
    write_bandwidth=st.floats(1e7, 1e12),
    verify_bandwidth=st.floats(1e7, 1e12),
    load_bandwidth=st.floats(1e7, 1e12),
    parameters=st.floats(1e6, 1e12),
)


@pytest.mark.parametrize("name", DURATIONS)
@given(settings=SETTINGS, sizes=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_more_work_never_takes_less_time(
    name: str, settings: EmulationConfig, sizes: tuple[int, int]
) -> None:
    less, more = sorted(sizes)
    duration = DURATIONS[name]
    assert duration(DeviceModel(settings), less) <= duration(DeviceModel(settings), more)


@pytest.mark.parametrize(
    "field",
    [
        "peak_flops",
        "memory_bandwidth",
        "write_bandwidth",
        "verify_bandwidth",
        "load_bandwidth",
        "time_dilation",
    ],
)
@given(settings=SETTINGS, factor=st.floats(1.0, 100.0))
def test_a_better_device_never_takes_longer(field: str, settings: EmulationConfig, factor: float) -> None:
    better = settings.model_copy(update={field: getattr(settings, field) * factor})
    for slow, fast in zip(_all(DeviceModel(settings)), _all(DeviceModel(better)), strict=True):
        assert fast <= slow * (1 + 1e-9)


@given(settings=SETTINGS, dilation=st.floats(0.01, 100.0))
def test_time_dilation_divides_every_duration(settings: EmulationConfig, dilation: float) -> None:
    dilated = settings.model_copy(update={"time_dilation": dilation, "to_train_s": 3.0})
    settings = settings.model_copy(update={"to_train_s": 3.0})
    plain = _all(DeviceModel(settings))
    changed = _all(DeviceModel(dilated))
    assert changed == pytest.approx([seconds / dilation for seconds in plain])


def test_an_8b_policy_on_an_h100_takes_the_known_times() -> None:
    # 16.4 GB at 3.35 TB/s; 6 x 8.2e9 x 1e6 FLOPs over 8 x 0.4 x 989e12
    assert MODEL.decode_s(1, 0) == pytest.approx(4.9e-3, rel=0.01)
    assert MODEL.train_s(10**6, num_ranks=8) == pytest.approx(15.5, rel=0.01)


def test_the_weights_of_an_8b_policy_take_the_times_that_were_measured() -> None:
    # 16.4 GB in bfloat16 at 0.45 GB/s, a checkpoint of 98.4 GB; 0.25 GB of delta at 0.7, and all checked at 2
    assert MODEL.save_s() == pytest.approx(36.4, rel=0.01)
    assert MODEL.save_checkpoint_s() == pytest.approx(219, rel=0.01)
    assert MODEL.weight_load_s() == pytest.approx(0.35 + 8.2, rel=0.01)


def test_an_engine_that_wakes_loads_what_its_host_has_unless_settings_say_otherwise() -> None:
    assert MODEL.to_rollout_s() == MODEL.wake_s() == pytest.approx(8.2)
    assert DeviceModel(EmulationConfig(to_rollout_s=4.0)).to_rollout_s() == 4.0


def test_ranks_share_a_train_step() -> None:
    assert MODEL.train_s(1000, 4) == pytest.approx(MODEL.train_s(1000) / 4)


def _all(model: DeviceModel) -> list[float]:
    durations = [duration(model, 4096) for duration in DURATIONS.values()]
    stored = [model.save_s(), model.save_checkpoint_s(), model.weight_load_s(), model.wake_s()]
    return [*durations, *stored, model.to_rollout_s(), model.to_train_s()]
