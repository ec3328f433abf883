from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.config.devices import DEVICES, Device, attainable_flops, find_device, train_priority
from sf_core.scheduling.plan import Worker, list_able_to_train, make_plan

figures = st.floats(1e9, 1e16)
devices = st.builds(Device, st.just("measured"), figures, figures, st.sampled_from([2, 4]))
clusters = st.lists(st.none() | devices, min_size=1, max_size=6).map(
    lambda found: [Worker(f"t{i}", frozenset({"rollout", "train"}), device) for i, device in enumerate(found)]
)


def names(workers: list[Worker]) -> list[str]:
    return [worker.name for worker in list_able_to_train(workers, RunConfig())]


def test_decoding_is_bound_by_bandwidth_and_training_by_compute() -> None:
    h100 = DEVICES["h100"]
    assert attainable_flops(h100, tokens=8192) == h100.peak_flops
    assert attainable_flops(h100, tokens=8) == 8 * h100.bandwidth


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    assert find_device("H100").kind == "h100"
    with pytest.raises(ValueError, match="unknown device kind 'k80'; use one of a100, "):
        find_device("k80")


@given(clusters, st.randoms())
def test_the_order_of_trainers_does_not_depend_on_the_order_in_which_workers_are_found(
    workers: list[Worker], random: object
) -> None:
    shuffled = list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert names(shuffled) == names(workers)
    assert sorted(names(workers)) == sorted(worker.name for worker in workers)


@given(devices, st.floats(1e-12, 1e12))
def test_a_priority_does_not_depend_on_the_unit_of_its_figures(device: Device, unit: float) -> None:
    scaled = replace(device, peak_flops=device.peak_flops * unit, bandwidth=device.bandwidth * unit)
    sizes = {"tokens_per_microbatch": 8192, "max_running": 128}
    assert train_priority(scaled, **sizes) == pytest.approx(train_priority(device, **sizes))


@given(devices, figures)
def test_more_compute_at_the_same_bandwidth_never_lowers_the_priority(device: Device, peak: float) -> None:
    sizes = {"tokens_per_microbatch": 8192, "max_running": 128}
    richer = replace(device, peak_flops=max(peak, device.peak_flops))
    assert train_priority(richer, **sizes) >= train_priority(device, **sizes) * (1 - 1e-12)


def test_the_compute_rich_trains_and_the_bandwidth_rich_rolls_out() -> None:
    both = frozenset({"rollout", "train"})
    workers = [
        Worker("t0", both, DEVICES["h20"]),
        Worker("t1", both, DEVICES["h100"]),
        Worker("x", frozenset({"agent"})),
        Worker("c", frozenset({"cpu"})),
    ]
    plan = make_plan(workers, RunConfig())
    assert (plan.trainers, plan.rollout) == (("t1",), ("t0",))


def test_equal_devices_and_unknown_ones_are_taken_by_name_and_unknown_ones_last() -> None:
    both = frozenset({"rollout", "train"})
    equal = [Worker(name, both, DEVICES["h100"]) for name in ("t2", "t1")]
    # two probes of the same kind never agree exactly
    close = Worker("t0", both, replace(DEVICES["h100"], bandwidth=3.2e12))
    assert names([Worker("a", both), *equal, close]) == ["t0", "t1", "t2", "a"]
