from pathlib import Path
from typing import Any

import pytest

from sf_core.config import DataplaneConfig, EnvironmentConfig, PolicyConfig, RunConfig, StorageConfig
from sf_core.run import begin_attempt, read_stored_config


def configured(folder: Path, url: str | None = "http://127.0.0.1:8700") -> RunConfig:
    return RunConfig(
        run_id="r", seed=7, dataplane=DataplaneConfig(url=url), storage=StorageConfig(root=str(folder))
    )


def test_a_run_is_read_back_as_it_was_configured_wherever_it_is_now(tmp_path: Path) -> None:
    config = configured(tmp_path / "before")
    begin_attempt(config)
    assert read_stored_config(str(tmp_path / "before" / "r")) == config
    (tmp_path / "before").rename(tmp_path / "after")
    moved = read_stored_config(str(tmp_path / "after" / "r"))
    assert (moved.run_dir, moved.seed) == (str(tmp_path / "after" / "r"), 7)


def test_the_data_plane_of_the_environment_is_used_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_DATAPLANE_URL", "http://127.0.0.1:8701")
    run = begin_attempt(configured(tmp_path, url=None))
    assert run.dataplane_url == "http://127.0.0.1:8701"
    assert read_stored_config(run.uri).dataplane.url is None


def test_without_a_data_plane_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SF_DATAPLANE_URL", raising=False)
    with pytest.raises(ValueError, match=r"no data plane: set dataplane\.url or SF_DATAPLANE_URL"):
        begin_attempt(configured(tmp_path, url=None))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 8), ("policy", PolicyConfig(hidden_size=32)), ("environment", EnvironmentConfig(reward="a:b"))],
)
def test_a_run_does_not_go_on_with_another_policy_seed_or_environment(
    tmp_path: Path, key: str, value: Any
) -> None:
    config = configured(tmp_path)
    begin_attempt(config)
    with pytest.raises(ValueError, match=f"run r was started with another {key}; "):
        begin_attempt(config.model_copy(update={key: value}))
    assert read_stored_config(config.run_dir) == config
