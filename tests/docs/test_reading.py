"""The site in a browser, opened from its folder without a server."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.bench.pages import new_page


def test_a_setting_is_found_and_opened(browser: Browser, site: Path) -> None:
    with new_page(browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").click()
        page.keyboard.type("cluster.yield_timeout_s")
        page.locator('.md-search-result__link[href$="#cluster.yield_timeout_s"]').first.click()
        expect(page.locator("h4[id='cluster.yield_timeout_s']")).to_be_in_viewport()
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_pages_fit_a_narrow_screen(browser: Browser, site: Path) -> None:
    with new_page(browser, viewport={"width": 390, "height": 800}) as page:
        for name in (
            "index",
            "start/quickstart",
            "reference/settings",
            "reference/routes",
            "comparison",
            "benchmarks",
        ):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
