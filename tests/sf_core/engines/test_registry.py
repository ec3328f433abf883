from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from sf_core.config.run_config import EngineName
from sf_core.engines.registry import ENGINES
from sf_core.settings import load_object
from sf_core.training.backends import TRAINERS


def test_the_kinds_are_those_that_a_configuration_can_name() -> None:
    assert [*ENGINES] == [*get_args(EngineName)]


@pytest.mark.parametrize("kind", ENGINES.values(), ids=ENGINES.keys())
def test_a_kind_can_be_made_and_has_a_trainer(kind: object) -> None:
    assert load_object(kind.make) and kind.trainer in TRAINERS


def test_asking_about_kinds_loads_no_library_that_computes() -> None:
    code = "import sys, sf_core.training.backends; assert not {'torch', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
