"""Names that users have typed or stored stay as they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from tests.bench.snapshot import files, shapes
from tests.snapshot import subjects


@pytest.mark.parametrize("subject", subjects.SUBJECTS, ids=lambda subject: subject.__name__)
def test_what_users_type_and_store_is_as_it_was(subject: Callable[[], list[str]]) -> None:
    files.check(subject.__name__, subject())


def test_a_difference_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(files.WRITE, raising=False)
    with pytest.raises(AssertionError, match=r"(?s)decide on it .*\n-attempt$"):
        files.check("status", [line for line in subjects.status() if line != "attempt"])


def test_a_name_of_a_field_that_is_stored_is_part_of_its_shape() -> None:
    assert "reward: float | none" in "\n".join(subjects.journal())
    assert shapes.keys({"a": [{"b": 1}]}) == {"a", "a[].b"}


@pytest.mark.parametrize("name", subjects.references())
def test_what_pages_name_can_be_imported(name: str) -> None:
    module, _, function = name.partition(":")
    assert not function or hasattr(importlib.import_module(module), function)
