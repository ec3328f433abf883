"""Compares the pipelines of a configuration in the simulator, in seconds and without starting anything.

python -m benchmarks.simulation configs/emulated.yaml
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.simulation.bubbles import measured_work
from benchmarks.simulation.comparison import MeasuredLengths, comparison
from benchmarks.simulation.device import Failures
from benchmarks.simulation.variants import TOOLS, Devices, Lognormal, lognormal_for
from sf_core.cli.terminal import console, fail
from sf_core.config.yaml_file import load_config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[list[Path], typer.Argument(help="YAML configuration.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="key.path=value, as often as needed.", show_default=False),
    ] = None,
    rollout: Annotated[int, typer.Option(min=0, help="Devices that only roll out.")] = 4,
    dual: Annotated[int, typer.Option(min=1, help="Devices that can train too.")] = 4,
    rollout_kind: Annotated[
        str | None, typer.Option(help="Kind of the rollout-only devices, such as h20.", show_default=False)
    ] = None,
    dual_kind: Annotated[
        str | None, typer.Option(help="Kind of the devices that can train, such as h800.", show_default=False)
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Run directory to draw lengths of sessions from.", show_default=False)
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            help="Run directory whose device-seconds give the least idle share.", show_default=False
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 140,
    median: Annotated[
        float, typer.Option(min=1, help="Median of a session's sampled tokens (log-normal).")
    ] = 600.0,
    sigma: Annotated[
        float, typer.Option(min=0, help="Sigma of that distribution: how heavy its tail is.")
    ] = 1.2,
    turn: Annotated[
        int, typer.Option(min=0, help="Sampled tokens of a turn; 0: one turn per session.")
    ] = 200,
    tool_median: Annotated[
        float, typer.Option(min=0, help="Median seconds that tools take after a turn (log-normal).")
    ] = 1.0,
    failures_per_hour: Annotated[float, typer.Option(min=0, help="Failures of one device per hour.")] = 0.0,
    picture: Annotated[
        str | None, typer.Option(help="PNG of the multiplexed timeline.", show_default=False)
    ] = None,
) -> None:
    """Compare the pipelines on devices of the configuration's `emulation`, or of given kinds."""
    failures = Failures(3600 / failures_per_hour, repair_s=60.0) if failures_per_hour else None
    devices = Devices(rollout, dual, rollout_kind, dual_kind)
    try:
        settings = load_config(config, overrides)
        if lengths is not None:
            drawn: Lognormal | MeasuredLengths = MeasuredLengths(lengths)
        else:
            tools = replace(TOOLS, turn=turn, median_s=tool_median) if turn else None
            drawn = lognormal_for(settings, prompt=prompt, median=median, sigma=sigma, tools=tools)
        work = measured_work(measured) if measured is not None else None
        console.print(comparison(settings, devices, drawn, failures=failures, work=work, picture=picture))
    except (ValueError, OSError) as error:
        fail(str(error))


if __name__ == "__main__":
    app()
