"""The page that compares runs, in a browser."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from storage.run_directory import RunDirectory
from tests import bench
from tests.bench.commands import sf
from tests.sf_core.reports.comparison.comparable_runs import make_run


def test_runs_are_drawn_over_each_other_offline(
    two_runs: list[RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sf("report", two_runs[0].uri, two_runs[1].uri) == (0, "comparison.html")
    with bench.reports.report_runs.opened(browser, str(tmp_path / "comparison.html"), offline=True) as page:
        reward = page.locator("figure.chart", has_text="Held-out reward")
        expect(reward.locator("path.line")).to_have_count(2)
        expect(reward.locator(".legend li")).to_have_text(["slow", "fast"])
        colours = reward.locator("path.line").evaluate_all("ps => ps.map(p => getComputedStyle(p).stroke)")
        assert len({*colours}) == 2
        expect(page.locator("#axis-note")).to_contain_text("x: Number of iterations")
        before = reward.locator("path.line").first.get_attribute("d")
        page.get_by_label("seconds").check()
        expect(page.locator("#axis-note")).to_contain_text("Seconds spent in iterations")
        expect(reward.locator("path.line")).to_have_count(2)
        # both were measured at their ends, which are at other times
        assert (
            page.locator("figure.chart", has_text="Held-out reward")
            .locator("path.line")
            .nth(1)
            .get_attribute("d")
            != before
        )
        results = page.locator("#results tbody tr")
        expect(results.nth(0)).to_contain_text("0.500 (v2)")
        expect(results.nth(1)).to_contain_text("1 of 2")
        settings = page.locator("#settings-that-differ tbody tr")
        expect(settings).to_contain_text(["seed", "train.learning_rate", "train.loss.policy"])
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_many_runs_have_curves_that_can_be_told_apart(tmp_path: Path, browser: Browser) -> None:
    runs = [make_run(tmp_path, f"run-{i}", [0.1 * i]) for i in range(8)]
    target = str(tmp_path / "page.html")
    assert sf("report", *(run.uri for run in runs), "-o", target)[0] == 0
    with bench.reports.report_runs.opened(browser, target) as page:
        lines = page.locator("figure.chart", has_text="Held-out reward").locator("path.line")
        looks = lines.evaluate_all(
            "ps => ps.map(p => getComputedStyle(p).stroke + getComputedStyle(p).strokeDasharray)"
        )
        assert len({*looks}) == 8


def test_names_and_settings_are_shown_as_text(tmp_path: Path, browser: Browser) -> None:
    first = make_run(tmp_path, "first", [0.5])
    second = make_run(
        tmp_path, "second", [0.5], environment={"settings": {"text": bench.reports.report_runs.HOSTILE}}
    )
    target = str(tmp_path / "page.html")
    assert sf("report", first.uri, second.uri, "-o", target)[0] == 0
    with bench.reports.report_runs.opened(browser, target) as page:
        expect(page.locator("#settings-that-differ")).to_contain_text("</script>")


def test_a_run_that_cannot_be_read_is_named(two_runs: list[RunDirectory], tmp_path: Path) -> None:
    good, broken = two_runs
    assert f"{tmp_path}/nothing: no run here" in sf("report", good.uri, f"{tmp_path}/nothing")[1]
    assert sf("report", good.uri, good.uri)[1].endswith(
        f"{good.uri} is named twice: name different runs to compare"
    )
    Path(broken.path("manifests", "00000", "train.json")).write_text("{", encoding="utf-8")
    code, output = sf("report", good.uri, broken.uri)
    assert (code, broken.uri in output) == (2, True), output
    assert good.uri not in output


def test_a_run_that_has_only_begun_is_compared(
    two_runs: list[RunDirectory], tmp_path: Path, browser: Browser
) -> None:
    begun = make_run(tmp_path, "begun", [])
    bench.runs.commit(begun, 0, "rollout", data={"failures": {}})
    target = str(tmp_path / "page.html")
    assert sf("report", begun.uri, two_runs[0].uri, "-o", target)[0] == 0
    with bench.reports.report_runs.opened(browser, target) as page:
        expect(page.locator("#results tbody tr").first).to_contain_text("0 of 2")
