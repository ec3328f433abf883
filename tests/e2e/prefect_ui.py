"""The pages of the Prefect UI that our users see, and the actions there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from playwright.sync_api import Browser, Locator, Page, expect

from tasks.page import RENEW_EVERY_S
from tests.bench.pages import new_page
from tests.bench.waits import wait_until


class PrefectUi:
    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self._base = base

    def open_form(self, deployment_id: UUID) -> None:
        self.page.goto(f"{self._base}/deployments/deployment/{deployment_id}")
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_text("Custom run").click()
        expect(self.field("iterations")).to_be_visible()

    def field(self, name: str) -> Locator:
        """A form field: title, description and input."""
        title = self.page.locator(".schema-form-property__label", has_text=re.compile(rf"^\s*{name}\b"))
        return title.locator("xpath=ancestor::div[contains(concat(@class, ' '), 'schema-form-property ')][1]")

    def fill_in(self, name: str, value: str) -> None:
        self.field(name).locator("input, textarea").first.fill(value)

    def choose(self, name: str, kind: str) -> None:
        """Choose another kind for the last setting of this name."""
        self.field(name).last.get_by_text(kind, exact=True).first.click()

    def unfold(self, section: str) -> None:
        """Show the fields of this section of the folded part."""
        if not self.field("seed").count():
            self.choose("all_settings", "change")
            expect(self.field("seed")).to_be_visible()
        self.choose(section, "change")

    def submit(self) -> None:
        self.page.get_by_role("button", name="Submit").click()
        self.page.wait_for_url(lambda url: not urlsplit(url).path.endswith("/run"))

    def open_run(self, flow_run_id: UUID) -> None:
        self.page.goto(f"{self._base}/runs/flow-run/{flow_run_id}")

    def leave(self) -> None:
        """Open an empty page, because that of an active run is redrawn continuously."""
        self.page.goto("about:blank")

    def press(self, button: str) -> None:
        """Press a button on the page of a run, and confirm it."""
        self.page.get_by_role("button", name=button, exact=True).click()
        self.page.locator(".p-modal").get_by_role("button", name=re.compile(f"Confirm|{button}")).click()

    def expect_state(self, name: str) -> None:
        expect(self.page.locator(".state-badge").first).to_have_text(name)

    def open_artifact_page(self, artifact_id: UUID) -> None:
        self.page.goto(f"{self._base}/artifacts/artifact/{artifact_id}")

    def open_artifact(self, key: str) -> None:
        """Open an artifact from the page of a run."""
        self.page.locator("#artifacts").click()
        self.page.get_by_text(key, exact=True).click()
        self.page.wait_for_url(re.compile("/artifacts/"))

    @property
    def rows(self) -> Locator:
        """Rows of a table, headings first."""
        return self.page.get_by_role("table").get_by_role("row")

    def await_rows(self, count: int, quiet_s: float) -> None:
        """Reload the page of an artifact until it has more than `count` rows; it does not update itself."""

        def are_there() -> bool:
            self.page.reload()
            expect(self.rows.nth(1)).to_be_visible()
            return self.rows.count() > count

        wait_until(are_there, f"{count} rows", quiet_s=quiet_s, every_s=RENEW_EVERY_S)

    def picture(self, file: Path) -> None:
        self.page.wait_for_timeout(500)
        self.page.screenshot(path=file, animations="disabled")


@contextmanager
def prefect_ui(browser: Browser, api: str) -> Iterator[PrefectUi]:
    """The Prefect UI in light colours."""
    with new_page(browser, viewport={"width": 1280, "height": 860}) as page:
        page.add_init_script("""localStorage.setItem("color-scheme", '"light"')""")
        yield PrefectUi(page, api.removesuffix("/api"))
