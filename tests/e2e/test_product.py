"""The product of docs/guides/agents/product.md, before, during and after a run that learns from it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sf_core.config import RunConfig
from storage.run_directory import RunDirectory
from storage.tables.trajectories import read_trajectories
from tests.bench import stacks
from tests.bench.stacks import invariants
from tests.bench.waits import wait_until

ITERATIONS = 10


@pytest.fixture
def desk(cluster: stacks.cluster.Cluster, tmp_path: Path) -> Iterator[stacks.desk.Desk]:
    desk = stacks.desk.Desk(tmp_path, PLANE=cluster.services.dataplane, RUN="product", NO_PROXY="127.0.0.1")
    yield desk
    desk.close()


def documented() -> dict[str, Any]:
    """The settings that the page shows."""
    settings = re.search(r"```yaml\n(.*?)```", stacks.desk.PAGE, re.S)
    assert settings is not None
    return dict(yaml.safe_load(settings[1])["rollout"])


def files_of_sessions(config: RunConfig) -> Counter[str]:
    """Number of files that have rows of a session, of those that external agents worked on."""
    found: Counter[str] = Counter()
    for kind in ("trajectories", "opened"):
        for uris in RunDirectory(config.run_dir).list_partitions(kind).values():
            found.update(name for uri in uris for name in {*read_trajectories(uri)["session_id"].to_pylist()})
    return found


# sessions of clients are in tests/sf_core/dataplane/runs/test_external.py
@pytest.mark.nightly
def test_a_product_teaches_the_policy_whatever_is_killed(
    cluster: stacks.cluster.Cluster, desk: stacks.desk.Desk
) -> None:
    config = cluster.config(
        "product",
        policy={"hidden_size": 64, "num_layers": 1, "warmstart": None},
        environment={
            part: f"tests.bench.stacks.desk_package:{part}" for part in ("tasks", "agent", "reward")
        },
        # what nobody could rate, because somebody was killed, says nothing of the policy
        rollout=documented()
        | {"groups_per_batch": 4, "outside_groups": 4, "max_tokens": 8}
        | {"session_timeout_s": 15.0, "reward_patience_s": 15.0}
        | {"on_failure": {"timeout": "retry_then_exclude"}},
        engine={"kind": "torch", "context_length": 64},
        train={"iterations": ITERATIONS, "learning_rate": 0.04},
        evaluate={"every": ITERATIONS, "num_tasks": 16},
    )
    assert desk.ask("Anybody there?").status_code == 503
    desk.open()
    flow = cluster.start(config)
    wait_until(lambda: stacks.cluster.is_committed(config, 1, "publish"), "two iterations", every_s=0.05)
    cluster.restart_dataplane()
    wait_until(lambda: stacks.cluster.is_committed(config, 3, "publish"), "four iterations", every_s=0.05)
    desk.kill()
    desk.start()
    wait_until(lambda: stacks.cluster.is_committed(config, 5, "publish"), "six iterations", every_s=0.05)
    flow.kill()
    flow.wait()
    cluster.finish(config, cluster.start(config))
    assert desk.ask("Anybody there?").status_code == 503
    invariants.check_result(config)
    told = "train.learning_rate 0.04 is 40 times the value that would be derived, 0.001 (the built-in policy"
    assert told in cluster.log(config)
    rewards = [
        invariants.manifests(config)[number, "rollout"]["data"]["reward_mean"] for number in range(ITERATIONS)
    ]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.15, rewards
    stored = files_of_sessions(config)
    assert set(stored.values()) == {1}
    assert desk.rated.keys() <= stored.keys()
    assert desk.num_untrained, "training paces the traffic"
