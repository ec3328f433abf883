import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from sf_core.config import RunConfig
from sf_core.reports.html.blocks import LAST_OUTPUT
from sf_core.reports.html.page import write_report
from storage.run_directory import RunDirectory
from storage.tables.outcomes import write_outcomes
from storage.tables.trajectories import write_trajectories
from tests import bench
from tests.bench import runs
from tests.bench.reports import report_runs

LIGHT = "rgb(246, 247, 249)"
DARK = "rgb(20, 23, 28)"


def open_session(page: Page, text: str) -> None:
    page.fill("#search", text)
    page.locator("#list [role=option]").first.click()
    page.wait_for_selector("#session .turn")


def colour_of(page: Page, token: str) -> str:
    script = "node => getComputedStyle(node).backgroundColor"
    return str(page.locator(f".tok[data-token]:text-is('{token}')").first.evaluate(script))


def test_a_run_opens_offline_with_its_curves_devices_and_tables(
    talking_run: RunDirectory, browser: Browser
) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16), offline=True) as page:
        reward = page.locator("figure.chart", has_text="Reward").locator("path.line")
        assert re.fullmatch(r"M[\d.]+,[\d.]+L[\d.]+,[\d.]+", reward.get_attribute("d") or "")
        expect(page.locator("figure.chart", has_text="KL to the teacher")).to_have_count(1)
        expect(page.locator("#timeline rect.kind-busy")).to_have_count(2)
        expect(page.locator("#timeline .boundary")).to_have_count(1)
        expect(page.locator("#tiles")).to_contain_text("sampled tokens200tokens/s")
        rows = page.locator("#iterations tbody tr")
        expect(rows.nth(1)).to_contain_text("1.000")
        expect(rows.nth(1)).to_contain_text("70 %")
        # what the manifest says was sampled, in ten seconds
        expect(rows.nth(1).locator("td").nth(9)).to_have_text("7")
        groups = page.locator("#groups tbody")
        expect(groups).to_contain_text("calculator-1")
        expect(groups).to_contain_text("too old")


def test_a_session_is_read_turn_by_turn(talking_run: RunDirectory, browser: Browser) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        open_session(page, "g1.0.a1")
        turns = page.locator("#session .turn")
        expect(turns.locator("header b")).to_have_text(["user", "assistant"])
        expect(turns.nth(0).locator(".tokens")).to_have_text("name a fruit")
        # the version changed in the middle of the answer
        expect(turns.nth(1).locator(".tokens")).to_have_text("apple" + "v0→v1" + " pie<|end|>")
        turns.nth(1).locator(".tok").first.hover()
        expect(page.locator(".token-note")).to_contain_text("log-prob -1.000 (p 0.368) · version 0, lag 1")


def test_tokens_of_an_evaluation_are_marked_as_not_used_for_training(
    talking_run: RunDirectory, browser: Browser
) -> None:
    held_out = [report_runs.talk("run-1.e0.0.a1", "name a tree", "oak", [0], group_id=None)]
    ref = write_trajectories(talking_run, 0, held_out, "part", kind="evaluations")
    runs.commit(talking_run, 0, "evaluate", outputs=[ref], data={"reward_mean": 1.0, "failures": {}})
    expected = {
        "e0.0.a1": ["sampled in an evaluation, not used for training", "sampled, not counted here"],
        "g0.0.a1": ["sampled, trained", "sampled, not trained here"],
    }
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        for session, marks in expected.items():
            open_session(page, session)
            for kind, mark in zip(("trained", "carried"), marks, strict=True):
                expect(page.locator(f"#session .legend .{kind}")).to_have_text(mark)
            page.locator(".turns .tok.trained").first.hover()
            expect(page.locator(".token-note")).to_contain_text(marks[0])


def test_what_a_command_wrote_last_is_unfolded(talking_run: RunDirectory, browser: Browser) -> None:
    last = "<b>thinking</b>\nso it is"
    wrote = "x" * LAST_OUTPUT + last
    report_runs.commit_iteration(
        talking_run, 2, [report_runs.talk("run-1.g2.0.a1", "hello", "hi", [2], output=wrote)]
    )
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        open_session(page, "g2.0.a1")
        page.get_by_text("what the command wrote last").click()
        shown = page.locator("#session pre")
        expect(shown).to_have_text("x" * (LAST_OUTPUT - len(last)) + last.replace("\n", "\u21b5\n"))
        open_session(page, "g1.0.a1")
        expect(page.get_by_text("what the command wrote last")).to_have_count(0)


def test_branches_are_a_tree_and_what_they_share_is_folded(
    talking_run: RunDirectory, browser: Browser
) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        open_session(page, "g1.0.a1")
        page.locator(".tree ul ul button").click()
        expect(page.locator(".turns > .turn .tokens")).to_have_text(["another", "pear<|end|>"])
        page.locator("#session summary").click()
        shared = page.locator("details .tok")
        expect(shared.first).to_have_text("a")
        expect(shared.first).to_contain_class("carried")
        page.keyboard.press("[")
        expect(page.locator(".turns .tokens").first).to_have_text("name a fruit")


def test_colours_follow_log_probs_or_policy_versions(talking_run: RunDirectory, browser: Browser) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        open_session(page, "g1.0.a1")
        assert colour_of(page, "a") == colour_of(page, "i")
        page.get_by_label("policy version").check()
        assert colour_of(page, "a") != colour_of(page, "i")
        page.keyboard.press("c")
        assert colour_of(page, "a") == colour_of(page, "i") == "rgba(0, 0, 0, 0)"


def test_dark_and_light_follow_the_system_or_the_switch(talking_run: RunDirectory, browser: Browser) -> None:
    target = write_report(talking_run.uri, None, 16)
    colour = "getComputedStyle(document.body).backgroundColor"
    with report_runs.opened(browser, target, color_scheme="dark") as page:
        assert page.evaluate(colour) == DARK
        page.click("#theme")
        assert page.evaluate(colour) == LIGHT
    with report_runs.opened(browser, target, color_scheme="light") as page:
        assert page.evaluate(colour) == LIGHT


def test_sessions_are_found_by_reward_and_keys(talking_run: RunDirectory, browser: Browser) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        page.keyboard.press("/")
        page.keyboard.type("calculator")
        expect(page.locator("#count")).to_have_text("2 of 2 sessions")
        page.fill("#reward-max", "0.5")
        expect(page.locator("#list small").first).to_have_text("run-1.g0.0.a1")
        page.fill("#reward-max", "")
        page.check("#interrupted")
        page.focus("#list")
        page.keyboard.press("ArrowDown")
        page.wait_for_selector("#session .turn")
        expect(page.locator("#session h3")).to_have_text("run-1.g1.0.a1")
        assert page.url.endswith("#session=run-1.g1.0.a1")


def test_a_group_opens_its_own_sessions_and_a_rejected_one_none(
    talking_run: RunDirectory, browser: Browser
) -> None:
    for number, group in ((2, "run-1.g2"), (3, "run-1.g20"), (4, "run-1.g70")):
        report_runs.commit_iteration(
            talking_run, number, [report_runs.talk(f"{group}.0.a1", "hello", "hi", [number], group_id=group)]
        )
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        rejected = page.get_by_role("cell", name="run-1.g7", exact=True)
        rejected.first.click()
        expect(page.locator("#count")).to_have_text("0 of 5 sessions")
        assert "#session" not in page.url
        page.get_by_role("cell", name="run-1.g2", exact=True).click()
        expect(page.locator("#count")).to_have_text("1 of 5 sessions")
        expect(page.locator("#session h3")).to_have_text("run-1.g2.0.a1")
        page.fill("#search", "run-1.g2")
        expect(page.locator("#count")).to_have_text("2 of 5 sessions")


def test_a_run_that_chooses_shows_its_groups_by_kind_and_what_it_dropped(
    talking_run: RunDirectory, browser: Browser
) -> None:
    dropped = runs.group_row(7, [1.0, 0.25], verdict="too old")
    row = report_runs.talk("run-1.g2.0.a1", "hello", "hi", [2])
    report_runs.commit_iteration(
        talking_run, 2, [row], [runs.group_row(2, [1.0]), dropped], right=1, mixed=6, wrong=2
    )
    # a rollout whose batch is not filtered yet, with a group of before its attempt that is in no outcomes
    outputs = [
        write_trajectories(talking_run, 3, [row], "part"),
        write_outcomes(talking_run, 3, [runs.group_row(8)], "part"),
    ]
    told = {"rejected": {"8": "timeout", "9": "max_lag"}, "failures": {}, "reward_mean": 1.0}
    runs.commit(talking_run, 3, "rollout", outputs=outputs, data=told | {"right": 0, "mixed": 4, "wrong": 0})
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        chart = page.locator("figure.chart", has_text="all wrong")
        expect(chart.locator(".legend li")).to_have_text(["all right", "mixed", "all wrong"])
        # the two iterations that told of kinds
        expect(chart.locator("rect")).to_have_count(2 * 3)
        heights = chart.locator("rect").evaluate_all("all => all.map((one) => +one.getAttribute('height'))")
        assert heights[1] == pytest.approx(6 * heights[0]) == pytest.approx(3 * heights[2])
        chart.get_by_role("img", name="Groups by iteration: all right, mixed, all wrong").hover(
            position={"x": 60, "y": 60}
        )
        expect(chart.locator("output")).to_have_text("iteration 2: right 1, mixed 6, wrong 2")
        cells = page.locator("#groups tbody tr", has_text="run-1.g7").first.locator("td")
        expect(cells.nth(2)).to_have_text("sums-7")
        expect(cells.nth(3).get_by_role("img")).to_have_attribute("aria-label", "1, 0.25")
        expect(cells.nth(4)).to_have_text("0.625")
        expect(page.locator("#groups tbody")).to_contain_text("not filtered yet")
        for index, task in (("8", "sums-8"), ("9", "")):
            cells = page.locator("#groups tbody tr", has_text=f"run-1.g{index}").first.locator("td")
            expect(cells.nth(2)).to_have_text(task)


def test_a_run_that_does_not_choose_has_no_groups_by_kind(
    talking_run: RunDirectory, browser: Browser
) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        expect(page.locator("figure.chart", has_text="Groups")).to_have_count(0)


def test_a_character_of_several_tokens_is_shown_where_it_is_complete(
    talking_run: RunDirectory, browser: Browser
) -> None:
    with report_runs.opened(browser, write_report(talking_run.uri, None, 16)) as page:
        open_session(page, "g0.0.a1")
        expect(page.locator(".turn.sampled .tokens")).to_have_text("Gr⋯ü⋯ße<|end|>")
        page.locator(".tok.partial").first.hover()
        expect(page.locator(".token-note")).to_contain_text("bytes c3, part of a character")


def test_what_agents_wrote_stays_text(hostile_run: RunDirectory, browser: Browser) -> None:
    target = write_report(hostile_run.uri, None, 16)
    assert "onerror" not in Path(target).read_text(encoding="utf-8")
    with report_runs.opened(browser, target) as page:
        open_session(page, "onerror")
        expect(page.locator(".turn .tokens")).to_have_text(
            [report_runs.HOSTILE, f"{report_runs.HOSTILE}<|end|>"]
        )
        expect(page.locator("#groups tbody")).to_contain_text(report_runs.HOSTILE)
        assert page.locator("img").count() == 0
        assert page.title() == "run-1 - SeamlessFlow"


def test_the_policy_of_the_page_allows_no_foreign_script(talking_run: RunDirectory, browser: Browser) -> None:
    target = write_report(talking_run.uri, None, 16)
    page_text = Path(target).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page_text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    Path(target).write_text(
        page_text.replace("<main>", "<script>document.title='owned'</script><main>"), encoding="utf-8"
    )
    with bench.pages.new_page(browser) as page:
        page.goto(f"file://{target}")
        page.wait_for_selector("html[data-ready]")
        assert page.title() == "run-1 - SeamlessFlow"


@pytest.mark.system
def test_a_run_of_50_mb_stays_within_the_size_and_says_what_is_left_out(
    talking_run: RunDirectory, browser: Browser
) -> None:
    rng = np.random.default_rng(0)
    length = 20_000
    for iteration in range(2, 10):
        rows = [
            bench.reports.tables.trajectory(
                f"run-1.g{iteration}.{i}.a1",
                [iteration] * length,
                token_ids=rng.integers(0, 256, length, np.int32),
                logprobs=-rng.exponential(1.0, length).astype(np.float32),
                turns=[],
            )
            for i in range(80)
        ]
        report_runs.commit_iteration(talking_run, iteration, rows)
    stored = sum(path.stat().st_size for path in Path(talking_run.path("trajectories")).rglob("*.parquet"))
    assert stored > 50e6
    target = write_report(talking_run.uri, None, 5)
    assert 4e6 < Path(target).stat().st_size <= 5e6
    with report_runs.opened(browser, target) as page:
        expect(page.locator("#left-out")).to_have_text(re.compile(r"^\d+ of 642 sessions are in this page"))
        # every iteration has some, the newest most
        for iteration in (0, 2, 9):
            page.fill("#search", f"run-1.g{iteration}.")
            assert page.locator("#list [role=option]").count() > 0


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path, browser: Browser) -> None:
    run = RunDirectory(str(tmp_path / "new"))
    run.write_config(RunConfig(run_id="new"))
    # an agent's first session is being written
    Path(run.partition("opened", 0)).mkdir(parents=True)
    with report_runs.opened(browser, write_report(run.uri, None, 16)) as page:
        expect(page.locator("#count")).to_have_text("0 of 0 sessions")


def test_who_may_not_write_into_the_run_gets_its_page_without_new_figures(
    talking_run: RunDirectory, tmp_path: Path
) -> None:
    Path(talking_run.path("metrics")).write_text("a file where the folder should be", encoding="utf-8")
    target = write_report(talking_run.uri, str(tmp_path / "page.html"), 16)
    assert target == str(tmp_path / "page.html") and Path(target).stat().st_size > 10_000


def test_a_size_that_cannot_hold_the_figures_is_refused(talking_run: RunDirectory) -> None:
    with pytest.raises(
        ValueError, match=r"without sessions the page needs 0\.1 MB, but the limit is 0\.001 MB: "
    ):
        write_report(talking_run.uri, None, 0.001)


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1"])
def test_a_size_that_is_none_is_refused(talking_run: RunDirectory, size: str) -> None:
    sentence = f"error: the size limit of the page must be more than 0 MB, got {size} MB"
    assert bench.commands.sf("report", talking_run.uri, f"--max-mb={size}") == (2, sentence)
