"""What a run's page shows while the run goes on: a table of its iterations, and a report in Markdown.

Reads the run directory alone. Where the page is, and when it is updated, is tasks/page.py's.
"""

from __future__ import annotations

import base64
import math
import re
import string
from collections.abc import Sequence

from sf_core.config import RunConfig
from sf_core.config.rollout_config import failures_text
from sf_core.reports.charts import draw_curve
from sf_core.reports.evaluations.comparison import GREEDY, GivenAnswer, compare_ends
from sf_core.reports.evaluations.judgements import sum_judges
from sf_core.reports.export.trackers import write_events
from sf_core.reports.iterations import Iteration, failures_of, kinds_text
from sf_core.reports.tables import cut_short, device_cells, make_printable
from sf_core.reports.timeline import draw_newest, record_devices
from sf_core.reports.view import RunView
from sf_core.reports.warnings import iteration_warnings, merge_warnings
from sf_core.waits import Facts, clock
from storage.run_directory import RunDirectory

NUM_ROWS = 100
"""Number of iterations on the page, the last ones; `sf inspect` shows all."""
NUM_DEVICE_ROWS = 20

Row = dict[str, float | str | None]


class RunPage:
    """The newest iterations of a run. An update reads only what was not settled at the last update."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._config = run.read_config(RunConfig)
        self._warnings: dict[int, dict[str, str]] = {}
        self._rows: dict[int, Row] = {}
        self._held_out: dict[int, float] = {}

    def update(self, newest: int) -> None:
        """Read what is committed up to this iteration, which must be complete. Also record the figures of
        devices, and write the event files that are missing."""
        view = RunView(self._run)
        record_devices(view, newest)
        write_events(self._run, newest)
        oldest = max(0, newest + 1 - NUM_ROWS)
        # device figures and the evaluation of an iteration come while the next one runs
        changed = view.between(max(oldest, max(self._rows, default=oldest) - 1), newest)
        self._held_out |= changed.held_out
        for iteration in changed.iterations:
            self._rows[iteration.number] = self._row(changed, iteration)
            self._warnings[iteration.number] = iteration_warnings(view, iteration.number, self._config)
        for shown in (self._rows, self._held_out, self._warnings):
            for number in [number for number in shown if number < oldest]:
                del shown[number]

    @property
    def progress(self) -> float:
        """Percentage of complete iterations."""
        return 100 * (max(self._rows, default=-1) + 1) / self._config.train.iterations

    @property
    def table(self) -> list[Row]:
        """Rows by iteration, newest first; what is not known yet is None."""
        return [self._rows[number] for number in sorted(self._rows, reverse=True)]

    def report(self) -> str:
        """Markdown with embedded charts, because a server cannot read the run directory."""
        newest = max(self._rows, default=-1)
        known = ((number, row["reward"]) for number, row in self._rows.items())
        rewards = {number: float(reward) for number, reward in known if reward is not None}
        view = RunView(self._run)
        devices = view.read_devices(range(max(0, newest + 1 - NUM_DEVICE_ROWS), newest + 1))
        names, rows = device_cells(devices)
        planned = self._config.train.iterations
        parts = [
            f"# Run {show_text(self._run.run_id)}",
            *filter(None, [show_text(view.describe_adapter())]),
            f"{newest + 1} of {planned} iterations are through. {self._progress_of_policy()}",
            *(f"- {show_text(warning)}" for warning in merge_warnings(self._warnings.values())),
            "## Reward",
            _embed_chart("mean reward by iteration", draw_curve(rewards, self._held_out)),
            *self._answers(),
            *self._judges(view),
            "## Devices",
            _embed_chart("what the devices did", draw_newest(view, newest)),
            "## Files",
            self._files(newest),
            "## Devices in figures",
            _table(names, rows, " ---: "),
        ]
        return "\n\n".join(parts) + "\n"

    def _progress_of_policy(self) -> str:
        if not self._held_out:
            return ""
        first = min(self._held_out)
        last = max(self._held_out)
        of_first = f"{self._held_out[first]:.3f} (version {first}) → " if first < last else ""
        return f"Held-out reward {of_first}{self._held_out[last]:.3f} (version {last})."

    def _answers(self) -> list[str]:
        """Answers of the first and the newest version that were measured, to the same tasks."""
        first, last, examples = compare_ends(RunView(self._run), self._held_out)
        if not examples.pairs:
            return []
        names = ["task", f"version {first}", f"version {last}"]
        rows = [
            [_show_short(new.prompt), _show_answer(old), _show_answer(new)] for old, new in examples.pairs
        ]
        if examples.has_greedy:
            names.append(f"version {last}, {GREEDY}")
            for row, (_, new) in zip(rows, examples.pairs, strict=True):
                row.append(_show_answer(new.greedy) if new.greedy else "")
        table = _table(names, rows)
        return ["## Answers to held-out tasks", f"{examples.selection.capitalize()}.", table]

    def _judges(self, view: RunView) -> list[str]:
        sentences = sum_judges(map(view.iteration, sorted(self._rows)))
        return (
            ["## Judges", "\n".join(f"- {show_text(sentence)}" for sentence in sentences)]
            if sentences
            else []
        )

    def _files(self, newest: int) -> str:
        run = self._run
        made = newest + 1
        named = {
            "trajectories, Parquet": run.path("trajectories"),
            "batches, Parquet": run.path("batches"),
            "metrics, Parquet": run.path("metrics"),
            "timeline of the whole run, for Perfetto; at its end": run.trace_file,
            f"weights of version {made}": run.weights_dir(made),
            f"checkpoint of version {made}": run.checkpoint_dir(made),
        }
        return _table(["what", "where"], [[what, f"[{uri}]({_url(uri)})"] for what, uri in named.items()])

    def _row(self, view: RunView, iteration: Iteration) -> Row:
        number = iteration.number
        rollout = iteration.stages["rollout"]
        filtered = iteration.stages["filter"]
        devices = view.devices.get(number)
        row: Row = {"iteration": number, "reward": _round(iteration.reward, 4)}
        if self._config.rollout.chooses:
            row["groups right/mixed/wrong"] = kinds_text(iteration.kinds)
        if self._config.train.teacher is not None:
            row["KL to the teacher"] = _round(iteration.stages["train"].data.get("teacher_kl"), 4)
        return row | {
            # an iteration makes the next version
            "failed sessions": failures_text(failures_of(rollout)),
            "held-out reward": _round(self._held_out.get(number + 1), 4),
            "lag": _round(iteration.lag, 3),
            "tokens/s": _round(iteration.tokens_per_second, 1),
            "idle share": _round(None if devices is None else 1 - devices["utilisation_cluster"], 3),
            "zero-advantage share": _round(filtered.data.get("zero_advantage_share"), 3),
        }


def waits_table(waits: Sequence[Facts]) -> str:
    """Markdown table of the current waits."""
    if not waits:
        return "Nothing takes long at the moment."
    rows = [[clock(wait["since"]), clock(wait["until"]), show_text(wait["what"])] for wait in waits]
    return _table(["since", "until", "for"], rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], rule: str = "---") -> str:
    """A table in Markdown; the rule under the names says how cells are aligned."""
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    return "\n".join([lines[0], f"|{'|'.join([rule] * len(names))}|", *lines[1:]])


def _show_answer(answer: GivenAnswer) -> str:
    return f"{answer.reward_text} {_show_short(answer.text)}"


def _show_short(text: str) -> str:
    """Text of a policy or a task for a cell of a table: without line breaks, and short."""
    return show_text(" ".join(cut_short(text).split()))


def show_text(text: str) -> str:
    """Markdown that shows this text, with no mark of Markdown or HTML in it that is read as one.

    Marks are escaped by a backslash, because the Prefect UI shows numeric entities as they are written."""
    return re.sub(f"[{re.escape(string.punctuation)}]", r"\\\g<0>", make_printable(text))


def _round(value: float | None, digits: int) -> float | None:
    """The rounded value; None for NaN, which JSON does not have."""
    return None if value is None or math.isnan(value) else round(value, digits)


def _embed_chart(title: str, png: bytes) -> str:
    return f"![{title}](data:image/png;base64,{base64.b64encode(png).decode()})"


def _url(uri: str) -> str:
    return uri if "://" in uri else f"file://{uri}"
