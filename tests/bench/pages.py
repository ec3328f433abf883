"""Pages of a browser in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page

from tests.bench.waits import patience


@contextmanager
def new_page(browser: Browser, **settings: Any) -> Iterator[Page]:
    """A new page. Its waits have the patience of all tests, because 30 s are too short under load."""
    page = browser.new_page(**settings)
    page.set_default_timeout(patience() * 1000)
    yield page
    page.close()
