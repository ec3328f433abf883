from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.clock import EventClock, Process, Signal
from benchmarks.simulation.comparison import MeasuredLengths, comparison
from benchmarks.simulation.device import Failures
from benchmarks.simulation.fleet import Turn
from benchmarks.simulation.outcome import Simulated
from benchmarks.simulation.variants import (
    VARIANTS,
    Devices,
    Lognormal,
    Tools,
    figures_of,
    simulate_variant,
)
from sf_core.config import RunConfig
from sf_core.dataplane.routing import rebalancing
from sf_core.scheduling.figures import by_worker, find_switches
from storage.run_directory import RunDirectory
from storage.tables.schema import NOT_SAMPLED
from storage.tables.trajectories import write_trajectories
from tests import bench
from tests.bench.reports import tables
from tests.benchmarks.simulation import small_fleets


def num_switches(run: Simulated) -> int:
    return sum(len(find_switches(spans)) for spans in by_worker(run.spans).values())


def simulated(name: str, devices: Devices = Devices(2, 2), **options: Any) -> Simulated:  # noqa: B008
    return simulate_variant(
        options.pop("config", small_fleets.config()), VARIANTS[name], devices, small_fleets.LENGTHS, **options
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_every_batch_holds_its_sessions_and_no_lag_exceeds_the_bound(name: str) -> None:
    run = simulated(name)
    groups = [[small_fleets.LENGTHS.length(group, member) for member in range(4)] for group in range(6 * 16)]
    assert sum(iteration.tokens for iteration in run.iterations) == sum(map(sum, groups))
    assert max(iteration.max_lag for iteration in run.iterations) <= VARIANTS[name].overlap


@given(group=st.integers(0, 5000), member=st.integers(0, 63), turn=st.integers(1, 2000))
def test_the_turns_of_a_session_add_up_to_it(group: int, member: int, turn: int) -> None:
    tools = Tools(turn=turn, result=30, median_s=1.0, sigma=1.2)
    sessions = replace(small_fleets.LENGTHS, tools=tools)
    turns = sessions(group, member)
    assert turns == sessions(group, member)
    assert sum(turn.num_wanted for turn in turns) == small_fleets.LENGTHS.length(group, member)
    assert [turn.num_new for turn in turns] == [
        small_fleets.LENGTHS.prompt,
        *[tools.result] * (len(turns) - 1),
    ]
    assert all(turn.tool_s > 0 for turn in turns[:-1]) and turns[-1].tool_s == 0
    assert sum(turn.num_new + turn.num_wanted for turn in turns) <= sessions.longest_context


def test_tools_take_the_time_that_was_drawn_for_them() -> None:
    tools = Tools(turn=100, result=50, median_s=2.0, sigma=1.0)
    seconds = [
        turn.tool_s
        for group in range(500)
        for turn in replace(small_fleets.LENGTHS, tools=tools)(group, 0)[:-1]
    ]
    assert np.median(seconds) == pytest.approx(2.0, rel=0.15)
    assert np.std(np.log(seconds)) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("name", VARIANTS)
def test_sessions_of_several_turns_lose_no_token_and_wait_for_their_tools(name: str) -> None:
    tools = Tools(turn=100, result=10, median_s=5.0, sigma=0.0)
    several = replace(small_fleets.LENGTHS, tools=tools)
    run = simulate_variant(small_fleets.config(), VARIANTS[name], Devices(2, 2), several)
    whole = simulate_variant(small_fleets.config(), VARIANTS[name], Devices(2, 2), small_fleets.LENGTHS)
    assert sum(i.tokens for i in run.iterations) == sum(i.tokens for i in whole.iterations)
    lengths = [small_fleets.LENGTHS.length(group, member) for group in range(6 * 16) for member in range(4)]
    assert run.iterations[-1].end > 5.0 * (tools.num_turns(max(lengths)) - 1)
    check_one_thing_at_a_time(run)


def test_a_turn_goes_on_from_what_the_one_before_left_where_there_is_room() -> None:
    tools = Tools(turn=50, result=10, median_s=0.0, sigma=0.0)
    several = replace(small_fleets.LENGTHS, prompt=1000, tools=tools)
    ends = [
        simulate_variant(
            small_fleets.config(emulation={"kv_tokens": room, "peak_flops": 1e14}),
            VARIANTS["disaggregated"],
            Devices(2, 2),
            several,
        )
        .iterations[-1]
        .end
        for room in (0, 1_000_000)
    ]
    assert ends[1] < 0.8 * ends[0]


def test_storing_and_loading_weights_takes_what_the_bytes_say() -> None:
    """Nothing overlaps in a disaggregated run: every iteration but the first waits for the whole path."""
    path = {"parameters": 1e9, "stored_bytes_per_parameter": 4.0, "delta_bytes_per_parameter": 4.0}
    fast = simulated("disaggregated", config=small_fleets.config(emulation=path))
    slow = path | {"write_bandwidth": 1e9, "verify_bandwidth": 2e9, "load_bandwidth": 4e9}
    found = simulated(
        "disaggregated", config=small_fleets.config(emulation=slow, train={"checkpoint_every": 2})
    )
    more = found.iterations[-2].end - fast.iterations[-2].end
    # five steps: 4 s to store, 1 s to read, 1 s to check and load; 1 s for the first engines. The 12 s of a
    # checkpoint pass beside two iterations
    assert more == pytest.approx(5 * (4 + 1 + 1) + 1, rel=0.05)
    # but not beside one, and the next checkpoint waits for it
    found = simulated("disaggregated", config=small_fleets.config(emulation=slow))
    ends = [iteration.end for iteration in found.iterations]
    assert [b - a for a, b in pairwise(ends[1:-1])] == pytest.approx([12.0] * 3)


def check_one_thing_at_a_time(run: Simulated) -> None:
    for spans in by_worker(run.spans).values():
        held = [span for span in spans if span.kind == "held"]
        done = [span for span in spans if span.kind != "held"]
        for ordered in (held, done):
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(ordered))
        for span in done:
            lease = held[bisect_right(held, span.start + 1e-9, key=lambda lease: lease.start) - 1]
            assert (lease.tag, span.end <= lease.end + 1e-9) == (span.tag, True)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_device_does_one_thing_at_a_time(name: str) -> None:
    check_one_thing_at_a_time(simulated(name))


@settings(max_examples=bench.properties.examples(40), deadline=None)
@given(
    name=st.sampled_from(sorted(VARIANTS)),
    devices=st.builds(Devices, st.integers(1, 3), st.integers(1, 3)),
    sigma=st.floats(0.0, 2.0),
    max_running=st.integers(1, 16),
    utilisation=st.floats(0.001, 1.0),
    to_rollout_s=st.floats(0.0, 5.0),
    to_train_s=st.floats(0.0, 5.0),
)
def test_whatever_the_fleet_training_has_the_devices_it_was_given_and_no_others(
    name: str, devices: Devices, sigma: float, max_running: int, utilisation: float, **switch_s: float
) -> None:
    """Invariants 6 and 7 in the plan of a run; every session is in a batch."""
    lengths = Lognormal(prompt=100, median=100.0, sigma=sigma, longest=1000)
    chosen = small_fleets.config(
        3,
        engine={"max_running": max_running},
        emulation={"utilisation": utilisation, **switch_s},
        rollout={"groups_per_batch": 4},
    )
    run = simulate_variant(chosen, VARIANTS[name], devices, lengths)
    check_one_thing_at_a_time(run)
    groups = [[lengths.length(group, member) for member in range(4)] for group in range(3 * 4)]
    assert sum(iteration.tokens for iteration in run.iterations) == sum(map(sum, groups))
    spans = by_worker(run.spans)
    trained = [span for span in run.spans if (span.tag, span.kind) == ("train", "busy")]
    if VARIANTS[name].pipeline != "colocated":
        for number in range(devices.rollout):
            # it is not taken once, from the first moment to the last
            [held] = [span for span in spans[f"r{number}"] if span.kind == "held"]
            assert (held.tag, held.start) == ("rollout", 0.0)
            assert held.end >= run.iterations[-1].end
    if not VARIANTS[name].overlap:
        sampled = [span for span in run.spans if (span.tag, span.kind) == ("rollout", "busy")]
        assert all(min(a.end, b.end) - max(a.start, b.start) < 1e-9 for a in trained for b in sampled)


def test_an_engine_that_is_still_being_loaded_yields_to_training() -> None:
    # the next batch is there before the trainers are engines again
    slow = small_fleets.config(emulation={"to_rollout_s": 4.0, "to_train_s": 0.0})
    run = simulated("multiplexed", config=slow)
    check_one_thing_at_a_time(run)


@pytest.mark.parametrize("name", ["async", "disaggregated"])
def test_trainers_that_are_not_lent_never_roll_out(name: str) -> None:
    tags = {span.worker: span.tag for span in simulated(name).spans}
    assert {worker: tag for worker, tag in tags.items() if worker[0] == "t"} == {"t0": "train", "t1": "train"}


def test_the_same_arguments_give_the_same_run() -> None:
    failures = Failures(mean_between_s=20.0, repair_s=1.0)
    assert simulated("multiplexed", failures=failures) == simulated("multiplexed", failures=failures)


@settings(max_examples=bench.properties.examples(15), deadline=None)
@given(name=st.sampled_from(sorted(VARIANTS)), mean=st.floats(1.0, 30.0), repair=st.floats(0.0, 3.0))
def test_devices_that_die_cost_time_and_no_session(name: str, mean: float, repair: float) -> None:
    run = simulated(name, config=small_fleets.config(4), failures=Failures(mean, repair))
    whole = simulated(name, config=small_fleets.config(4))
    assert sum(i.tokens for i in run.iterations) == sum(i.tokens for i in whole.iterations)
    check_one_thing_at_a_time(run)


def test_groups_that_would_grow_too_old_are_dropped_with_their_sessions() -> None:
    heavy = small_fleets.config(rollout={"on_max_lag": "drop"}, emulation={"peak_flops": 1e16})
    long = Lognormal(prompt=100, median=100.0, sigma=2.0, longest=1000)
    run = simulate_variant(heavy, VARIANTS["async"], Devices(2, 2), long)
    waited = simulate_variant(
        small_fleets.config(emulation={"peak_flops": 1e16}), VARIANTS["async"], Devices(2, 2), long
    )
    assert len(run.iterations) == 6 and max(iteration.max_lag for iteration in run.iterations) <= 1
    # others take the place of groups that were dropped: those with the longest sessions
    assert sum(i.tokens for i in run.iterations) < sum(i.tokens for i in waited.iterations)


def test_multiplexing_leaves_less_idle_than_waiting_does() -> None:
    # a batch takes rollout three times the device time of training
    busy = small_fleets.config(emulation={"utilisation": 1.0}, rollout={"groups_per_batch": 32})
    figures = {
        name: figures_of(simulated(name, config=busy, overheads=small_fleets.NOTHING)) for name in VARIANTS
    }
    assert figures["multiplexed"].idle_fraction < figures["async"].idle_fraction
    assert figures["async"].idle_fraction < figures["disaggregated"].idle_fraction
    assert figures["colocated"].tokens_per_second > figures["colocated_drained"].tokens_per_second


def test_training_by_compute_and_rollout_by_bandwidth_pays_on_devices_of_two_kinds() -> None:
    busy = small_fleets.config(emulation={"utilisation": 1.0}, rollout={"groups_per_batch": 32})
    two_kinds = Devices(2, 2, rollout_kind="h20", dual_kind="h800")

    def gain(devices: Devices) -> float:
        runs = [
            simulated(name, devices, config=busy, overheads=small_fleets.NOTHING)
            for name in ("multiplexed", "colocated")
        ]
        multiplexed, colocated = (figures_of(run).tokens_per_second for run in runs)
        return multiplexed / colocated

    assert gain(two_kinds) > 1.25 * gain(Devices(2, 2))


def test_requests_move_to_engines_that_came_too_late_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # the first engine that is there could take the whole batch
    roomy = small_fleets.config(engine={"kind": "emulated", "max_running": 64, "context_length": 2048})
    balanced = simulated("colocated_drained", config=roomy, overheads=small_fleets.NOTHING)
    monkeypatch.setattr(rebalancing, "EXCESS", float("inf"))
    left_alone = simulated("colocated_drained", config=roomy, overheads=small_fleets.NOTHING)
    assert (balanced.moves > 0, left_alone.moves) == (True, 0)
    assert balanced.iterations[-1].end < left_alone.iterations[-1].end


def test_a_switch_that_is_never_repaid_is_not_made() -> None:
    costly = simulated(
        "multiplexed", config=small_fleets.config(emulation={"to_rollout_s": 500.0, "to_train_s": 500.0})
    )
    free = simulated(
        "multiplexed", config=small_fleets.config(emulation={"to_rollout_s": 0.0, "to_train_s": 0.0})
    )
    # the first loan of each of two trainers is made before its cost is known
    assert num_switches(costly) == 2
    assert num_switches(free) > 2 * 2


def test_a_trainer_that_was_not_lent_trains_without_a_switch_and_is_asked_again() -> None:
    dear = small_fleets.config(emulation={"to_rollout_s": 0.0, "to_train_s": 500.0})
    run = simulated("multiplexed", config=dear)
    trained = [span for span in run.spans if (span.worker, span.tag) == ("t0", "train")]
    # what it has computed is stored before the step is over
    assert [span.kind for span in trained if span.kind != "held"] == ["moving", *["busy", "moving"] * 6]
    # two trainers: after each of six steps, and at the beginning of the five iterations that follow
    assert run.not_lent == 2 * (6 + 5)


def test_a_switch_that_was_dear_once_is_tried_again() -> None:
    dear = small_fleets.config(iterations=12, emulation={"to_rollout_s": 0.0, "to_train_s": 500.0})
    assert num_switches(simulated("multiplexed", config=dear)) > 2


def test_lengths_are_drawn_from_a_run(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-1"))
    run.write_config(RunConfig(run_id="run-1"))
    first = tables.trajectory("s0", [*tables.GIVEN, 0, 0, 0])
    second = tables.trajectory("s1", [*tables.GIVEN, 0])
    # a branch of s0 repeats its eight tokens; one was given and two were sampled after them
    mask = np.array([0] * 9 + [1, 1], np.bool_)
    branch = tables.trajectory(
        "s0", [*tables.GIVEN, 0, 0, 0, NOT_SAMPLED, 0, 0], shared_prefix=8, loss_mask=mask
    )
    rows = write_trajectories(run, 0, [first, branch, second], "part")
    bench.runs.commit(run, 0, "rollout", outputs=[rows])
    lengths = MeasuredLengths(run.uri)
    assert {tuple(lengths(group, 0)) for group in range(50)} == {(Turn(6, 5),), (Turn(5, 1),)}
    with pytest.raises(ValueError, match="nowhere"):
        MeasuredLengths(str(tmp_path / "nowhere"))


def test_the_comparison_names_what_it_cannot_count(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="iterations must be at least 4"):
        comparison(small_fleets.config(3), Devices(1, 1), small_fleets.LENGTHS)
    picture = tmp_path / "timeline.png"
    table = comparison(small_fleets.config(4), Devices(1, 1), small_fleets.LENGTHS, picture=str(picture))
    assert table.row_count == len(VARIANTS) and picture.stat().st_size > 1000


def test_time_stands_still_only_if_nothing_can_happen() -> None:
    clock = EventClock()
    signal = Signal()
    heard = []

    def listener() -> Process:
        yield signal
        heard.append(clock.now)

    clock.start(listener())
    clock.after(2.0, clock.give, signal)
    with pytest.raises(RuntimeError, match="everyone waits"):
        clock.run(lambda: False)
    assert heard == [2.0]


def test_overheads_are_on_the_clock_of_the_machine() -> None:
    """Twice the dilation halves what devices do, and leaves orchestration as it is."""
    overheads = replace(small_fleets.NOTHING, next_iteration=0.0, seal=1.0)
    slow = simulated("disaggregated", overheads=overheads).iterations[-1].end
    fast = (
        simulated(
            "disaggregated", config=small_fleets.config(emulation={"time_dilation": 1e6}), overheads=overheads
        )
        .iterations[-1]
        .end
    )
    assert slow > fast == pytest.approx(6.0, rel=1e-2)
