from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_BLOCKS_REGISTER_ON_START,
    PREFECT_API_DATABASE_CONNECTION_URL,
    PREFECT_API_DATABASE_MIGRATE_ON_START,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    temporary_settings,
)

from tests.bench.stacks.prefect_home import make_prefect_home


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    """Database of a Prefect server in this process."""
    home = make_prefect_home(tmp_path / "home")
    settings = {
        PREFECT_API_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{home}/prefect.db",
        # the client gives the application 30 s to start; migrations need half of that on two quiet cores
        PREFECT_API_DATABASE_MIGRATE_ON_START: False,
        PREFECT_API_BLOCKS_REGISTER_ON_START: False,
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    with temporary_settings(settings):
        yield Path(home, "prefect.db")
