"""docs/benchmarks.md and README's six figures, made from benchmarks/results/: `python -m benchmarks.table`.

Rows without a results file are left out. The file is long, because the rows are one table of data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.curriculum_claims import CLAIMS
from benchmarks.results import RESULTS, ROOT

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- from here: python -m benchmarks.table -->"
END = "<!-- to here -->"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of `str.format` templates, whose fields are those of the benchmark's line."""

    result: str
    """Name of a benchmark in benchmarks/results.py."""
    what: str
    ours: str
    baseline: str = ""


FIGURES = {
    "Engine": Row(
        "engines",
        "tokens/s sampled, 10M parameters",
        "{10m[varied_lengths][ours_tokens_per_second]:,}",
        "{10m[varied_lengths][vllm_tokens_per_second]:,}, vLLM's CPU build",
    ),
    "Generation and training together": Row(
        "real_model",
        "tokens/s sampled and trained, a pretrained model of 135M parameters in bfloat16",
        "{ours[tokens_per_second]:,.0f}",
        "{trl[tokens_per_second]:,.0f}, TRL's `GRPOTrainer`",
    ),
    "Gateway": Row(
        "gateway",
        "requests/s",
        "{requests_per_second:,.0f}",
        "{litellm_requests_per_second:,.0f}, LiteLLM's proxy",
    ),
    "Capture": Row(
        "capture",
        "seconds to record and export a session of {linear[turns]} turns",
        "{linear[seconds]:.2f}",
        "{naive[record_seconds]:.1f}, encoding each request again",
    ),
    "Storage": Row(
        "storage",
        "bytes per token",
        "{bytes_per_token[parquet]:.1f}",
        "{bytes_per_token[jsonl_zstd]:.1f}, JSONL compressed with zstd",
    ),
    "Orchestration": Row(
        "orchestration",
        "seconds of overhead per iteration",
        "{orchestration_seconds_per_iteration:.2f}",
        "{baseline_plain_prefect_seconds_per_iteration:.2f}, plain Prefect subflows",
    ),
}
"""README's rows, by the section of docs/benchmarks.md that has the others."""

SECTIONS = {
    "Engine": ("engines", "engines_100m", "resumed", "schemas"),
    "Trainer": ("trainer", "long_rows", "recipes", "teachers"),
    "Pictures": ("images",),
    "What is sampled": ("curricula", "group_sessions"),
    "Gateway": ("gateway", "gateway_turns", "streaming"),
    "Capture": ("capture",),
    "Storage": ("storage",),
    "Orchestration": ("orchestration", "quickstart"),
    "Generation and training together": ("real_model", "quickstart_vs_trl"),
    "Agents": ("agent_clients", "agent_runs"),
    "Weights": ("weight_path", "weights"),
    "Sandbox": ("harness",),
    "Pipelines": ("pipelines", "pipelines_deltas"),
}
"""Sections of docs/benchmarks.md, and the results in each."""

NOTES = {
    "What is sampled": """\
Rows with "until the goal" compare a recipe with the recipe `uniform`, at the same seeds. The goal is a
held-out reward of 0.8 on the tasks that can be learned. For example, "tasks .5/.1/0" means that half of the
tasks are easy, a tenth is impossible, and none has a random reward. "Flips .1" inverts a tenth of the
training rewards. "Told of others" gives the curriculum the results of wrong tasks. Our figure is the ratio
to `uniform`, with the 95 % interval of this ratio. Below 1 is better. The prediction names the range that
should contain the interval.
"""
}
"""Text before the table of a section."""

ABOUT = """# Benchmarks

`python -m benchmarks.table` writes this page. Each row shows the figures that its script printed last, the
date, and the commit. We measured the baseline in the same run, on the same machine. No figure is from a
GPU. `python -m` runs a script of these tables; `python -m benchmarks.results NAME` also keeps the new
figures.

`python -m benchmarks.curricula --lines FILE` takes hours. The script writes a line to FILE after each run.
If you start the script again, it skips runs that FILE contains. `benchmarks/curricula.py` describes the
conditions. `benchmarks/curriculum_claims.py` lists the predictions, which were written before the first
run.
"""


def _tokens(arm: str) -> str:
    """Tokens to the goal of an arm that was run with three seeds."""
    return ", ".join(f"{{{arm}[runs][{seed}][tokens_to_goal]:,}}" for seed in range(3))


def _pipelines(result: str, weights: str) -> Row:
    def of(name: str) -> str:
        return f"{{{name}[tokens_per_second]:,.0f}}, {{{name}[idle_fraction]:.1%}}"

    others = {
        "async": "async",
        "colocated": "colocated",
        "colocated_drained": "colocated, drained",
        "disaggregated": "disaggregated",
    }
    return Row(
        result,
        "{devices} simulated H100, half of them with the tags `rollout` and `train`, up to "
        "{in_flight_cap_per_engine} requests per engine, batches of {sessions_per_batch} sessions of several "
        f"turns with tools, maximum lag {{max_lag_allowed}}, {weights}: tokens/s, idle share",
        f"{of('multiplexed')}: multiplexed",
        "; ".join(f"{of(name)}: {shown}" for name, shown in others.items()),
    )


FIGURE_NAMES = {"tokens": "sampled tokens", "iterations": "iterations"}


def _claims() -> list[Row]:
    """A row for each prediction of benchmarks/curriculum_claims.py."""
    return [
        Row(
            "curricula",
            f"{FIGURE_NAMES[claim.figure]} until the goal, tasks {claim.dose}: {claim.recipe}",
            f"{{claims[{place}][shown]}}",
            f"predicted {claim.expected}",
        )
        for place, claim in enumerate(CLAIMS)
    ]


def _spare(sigma: str, size: str) -> Row:
    at = f"spare_sessions[sigma {sigma}][{size}]"
    return Row(
        "group_sessions",
        f"groups that end after {size.replace('_', ' ')} sessions, lognormal lengths with sigma {sigma}: "
        "time and sampled tokens per group, length of a session that counts, share of the longest tenth that "
        "counts",
        ", ".join(f"{{{at}[{name}]:.2f}}" for name in ("time", "tokens", "counted_length"))
        + f", {{{at}[share_of_longest_tenth]:.0%}}",
        "1, 1, 1, 100%, groups of 8",
    )


def _april(key: str) -> Row:
    return Row(
        "group_sessions",
        f"partial rollout, 8 simulated H100 with both tags, lognormal lengths with {key}: tokens/s",
        f"{{april[{key}][partial_tokens_per_second]:,.0f}}; {{april[{key}][ratio]:.2f}} times the baseline",
        f"{{april[{key}][baseline_drained_tokens_per_second]:,.0f}}, drained",
    )


def _client(result: str, name: str, what: str, shown: str) -> Row:
    """Cost of the client of README's agent. Baseline: each session makes a client, which reads a file."""
    ours, baseline, predicted = (shown.format(at) for at in (name, "own_file", f"predicted[{name}]"))
    return Row(
        result, f"README's example, {what}", ours, f"{baseline}, a client per session; predicted {predicted}"
    )


CLIENT_MS = "{{{0}[cpu_ms_per_session]:.1f}}"


def _long_rows(figure: str) -> tuple[str, str, str]:
    """A figure of our step, of that by the rule before and of TRL's, each after all three prompts."""
    ours, before, trl = (
        " / ".join(f"{{prompt_{prompt}[{side}][{figure}]:,.0f}}" for prompt in (128, 2048, 8192))
        for side in ("ours", "before", "trl")
    )
    return ours, before, trl


def _long_rows_row() -> Row:
    speed = _long_rows("tokens_per_second")
    memory = _long_rows("peak_mb")
    before, trl = (f"{speed[side]}, {memory[side]} MB" for side in (1, 2))
    return Row(
        "long_rows",
        "one step, 20M parameters, 16 rows, prompts of 128 / 2,048 / 8,192: tokens/s, memory",
        f"{speed[0]}, {memory[0]} MB",
        f"{before}, before decision 071; {trl}, TRL's `GRPOTrainer`",
    )


ROWS = (
    *_claims(),
    *map(_april, ("sigma 0", "sigma 1.2", "sigma 1.2, turns with tools")),
    Row(
        "group_sessions",
        "share of the groups of 8 that is lost if {least_sessions[failing]:.0%} of the sessions fail: "
        "`least_sessions: 6`",
        "{least_sessions[6_of_8_lost]:.2%}",
        "{least_sessions[baseline_lost]:.1%}, all 8 sessions needed",
    ),
    *(_spare(sigma, size) for sigma in ("0.6", "1.2") for size in ("8_of_9", "8_of_10")),
    Row(
        "resumed",
        "{requests} requests of {parameters} parameters that come back after new weights: tokens filled, CPU "
        "seconds of filling",
        "{ours[tokens]:,}; {ours[cpu_s]:.1f}, ratios {token_ratio:.2f} and {cpu_ratio:.2f}, predicted "
        "{predicted[token_ratio]:.2f} and {predicted[cpu_ratio]:.2f}",
        "{whole_prompts[tokens]:,}; {whole_prompts[cpu_s]:.1f}, sampled tokens taken for the prompt",
    ),
    Row(
        "real_model",
        "a pretrained model of 135M parameters (`sf model smollm2`) on {cores} cores: tokens/s sampled and "
        "trained, CPU-seconds per 1,000 tokens, peak memory of all processes in GB",
        "{ours[tokens_per_second]:,.0f}, {ours[cpu_s_per_1000_tokens]:,.0f}, {ours[peak_gb]:.1f}",
        "{trl[tokens_per_second]:,.0f}, {trl[cpu_s_per_1000_tokens]:,.0f}, {trl[peak_gb]:.1f}, "
        "TRL's `GRPOTrainer`",
    ),
    _client("agent_clients", "own_folder", "certificates read from a folder: CPU ms per session", CLIENT_MS),
    _client("agent_clients", "shared", "`endpoint.client()`: CPU ms per session", CLIENT_MS),
    _client(
        "agent_runs",
        "shared",
        "`endpoint.client()`: tokens/s; CPU ms per session of the agents' worker",
        f"{{{{{{0}}[tokens_per_second]:,.0f}}}}; {CLIENT_MS}",
    ),
    Row(
        "orchestration",
        "seconds of overhead per iteration",
        "{orchestration_seconds_per_iteration:.2f}",
        "{baseline_plain_prefect_seconds_per_iteration:.2f}, plain Prefect subflows",
    ),
    Row(
        "quickstart",
        "quickstart: seconds per iteration, seconds without a stage, idle r0, t0",
        "{seconds_per_iteration:.2f}, {seconds_without_a_stage:.2f}, {idle[r0]:.0%}, {idle[t0]:.0%}",
        "{lent[seconds_per_iteration]:.2f}, {lent[seconds_without_a_stage]:.2f}, {lent[idle][r0]:.0%}, "
        "{lent[idle][t0]:.0%}, `pipeline=multiplexed`",
    ),
    Row(
        "quickstart",
        "quickstart, multiplexed: seconds to switch to train, to sample",
        "{lent[to_train_seconds]:.2f}, {lent[to_rollout_seconds]:.2f}",
    ),
    *(
        Row(
            name,
            f"{size} parameters, {{threads}} threads, answers of {lengths}: tokens/s",
            f"{{{key}[{load}][ours_tokens_per_second]:,}}",
            f"{{{key}[{load}][transformers_tokens_per_second]:,}}, `transformers.generate`; "
            f"{{{key}[{load}][vllm_tokens_per_second]:,}}, vLLM through our engine; "
            f"{{{key}[{load}][vllm_bare_tokens_per_second]:,}}, vLLM alone",
        )
        for name, key, size in (
            ("engines", "1m", "1M"),
            ("engines", "10m", "10M"),
            ("engines_100m", "100m", "100M"),
        )
        for load, lengths in (("varied_lengths", "different lengths"), ("equal_lengths", "one length"))
    ),
    Row(
        "schemas",
        "{at_once} concurrent answers that follow a JSON Schema, 10M parameters: tokens/s of the built-in "
        "engine; of vLLM",
        "{torch[schema_tokens_per_second]:,}; {vllm[schema_tokens_per_second]:,}",
        "{torch[free_tokens_per_second]:,}; {vllm[free_tokens_per_second]:,}, without a schema",
    ),
    Row(
        "images",
        "a turn with a new screenshot of 1280 by 720 pixels and all earlier screenshots, up to 20: CPU time "
        "of the data plane in ms; stored kB per screenshot",
        "{gateway[pictures][cpu_ms_per_turn]}; {gateway[stored_kb]}",
        "{gateway[text][cpu_ms_per_turn]}, a line of text instead; {gateway[png_kb]}, as PNG",
    ),
    Row(
        "images",
        "session of 20 screenshots: share of the prompt tokens that vLLM found in its prefix cache",
        "{engine[cached_share]:.0%}",
        "{engine[cached_share_at_most]:.0%}, all tokens of earlier turns",
    ),
    Row(
        "images",
        "16 concurrent prompts with one image each, vLLM, 0.8M parameters: tokens/s",
        "{engine[tokens_per_second_pictures]:,}",
        "{engine[tokens_per_second_text]:,}, the same number of text tokens",
    ),
    Row(
        "images",
        "share of the vision tower in the time of the first training step on images, 0.8M parameters",
        "{trainer[tower_share]:.0%}",
        "0%, later steps on the same images",
    ),
    Row(
        "quickstart_vs_trl",
        "1M parameters: tokens/s sampled and trained",
        "{1m[ours][tokens_per_second]:,.0f}; {1m[ratio]:.2f} times the baseline, {1m[ratio_min]:.2f} to "
        "{1m[ratio_max]:.2f} in {1m[pairs]} pairs",
        "{1m[trl][tokens_per_second]:,.0f}, TRL's `GRPOTrainer`",
    ),
    Row(
        "quickstart_vs_trl",
        "10M parameters: tokens/s sampled and trained",
        "{10m[ours][tokens_per_second]:,.0f}; {10m[ratio]:.2f} times the baseline, {10m[ratio_min]:.2f} to "
        "{10m[ratio_max]:.2f} in {10m[pairs]} pairs",
        "{10m[trl][tokens_per_second]:,.0f}, TRL's `GRPOTrainer`",
    ),
    Row(
        "trainer",
        "one optimiser step, 20M parameters, 64 completions of 16 to 512 tokens, vocabulary of 32,000: "
        "tokens/s; peak memory beside the weights in MB",
        "{32k[ours][tokens_per_second]:,.0f}; {32k[ours][peak_mb]:,.0f}",
        "{32k[trl][tokens_per_second]:,.0f}; {32k[trl][peak_mb]:,.0f}, TRL's `GRPOTrainer`",
    ),
    Row(
        "trainer",
        "the same step with a vocabulary of 151,936",
        "{151k[ours][tokens_per_second]:,.0f}; {151k[ours][peak_mb]:,.0f}",
        "{151k[trl][tokens_per_second]:,.0f}; {151k[trl][peak_mb]:,.0f}, TRL's `GRPOTrainer`",
    ),
    _long_rows_row(),
    Row(
        "recipes",
        "quickstart: trained tokens until a held-out reward of 0.8, three seeds: recipe `ppo`",
        _tokens("ppo"),
        f"{_tokens('grpo')}, recipe `grpo`",
    ),
    Row(
        "teachers",
        "quickstart: trained tokens until a held-out reward of 0.75, three seeds: a teacher "
        "(`distill: reverse`) with 256 tasks per batch; with groups of 8",
        f"{_tokens('reverse-single')}; {_tokens('reverse')}",
        f"{_tokens('rewards')}, rewards instead of a teacher",
    ),
    Row(
        "capture",
        "seconds to record and export a session of {linear[turns]} turns and {linear[tokens]:,} tokens",
        "{linear[seconds]:.2f}",
        "{naive[record_seconds]:.1f}, encoding each request again",
    ),
    Row(
        "storage",
        "stored trajectories, bytes per token",
        "{bytes_per_token[parquet]:.1f}",
        "{bytes_per_token[jsonl]:.1f}, JSONL; {bytes_per_token[jsonl_zstd]:.1f}, JSONL with zstd",
    ),
    Row(
        "storage",
        "ms to read the rewards of an iteration of {rows:,} sessions",
        "{rewards_ms[parquet]:.1f}",
        "{rewards_ms[jsonl]:.0f}, JSONL",
    ),
    Row(
        "gateway_turns",
        "CPU time of the gateway for turn 200 of a session, divided by that for turn 10; 200 tokens per turn",
        "{turn_cost_ratio}",
    ),
    Row(
        "gateway",
        "requests/s at saturation, answers of 20 tokens, each turn written to the journal",
        "{requests_per_second:,.0f}",
        "{litellm_requests_per_second:,.0f}, LiteLLM's proxy; "
        "{agentlightning_requests_per_second:,.0f}, agent-lightning's",
    ),
    Row(
        "gateway",
        "requests/s at saturation, prompts of 4,000 tokens, answers of 300 tokens with log-probs",
        "{long_requests_per_second:,.0f}",
        "{litellm_long_requests_per_second:,.0f}, LiteLLM's proxy; "
        "{agentlightning_long_requests_per_second:,.0f}, agent-lightning's",
    ),
    Row(
        "streaming",
        "{stream_sessions} concurrent streams, each of one token per {stream_step_ms:.0f} ms: tokens/s; "
        "tokens per CPU-second of the data plane; median of ms between two events",
        "{stream_tokens_per_second:,}; {stream_tokens_per_core_second:,}; {stream_gap_ms_p50:.0f}",
    ),
    Row(
        "weight_path",
        "weights of 100M parameters on a local disk, one thread: bytes/s to write, to verify, to load",
        "{100m[write][bytes_per_second]:.2e}, {100m[verify][bytes_per_second]:.2e}, "
        "{100m[load][bytes_per_second]:.2e}",
    ),
    Row(
        "weights",
        "share of the bytes of a version that changed, 100M parameters in bfloat16, learning rate 1e-6",
        "{100m[delta_ratio]:.1%}; {100m[delta_ratio_of_first_step]:.1%} after the first step",
        "100%, all weights",
    ),
    Row(
        "weights",
        "seconds in which the built-in engine pauses to load these changes",
        "{100m[standstill_s][torch][pulled_delta]:.3f}",
        "{100m[standstill_s][torch][paused_full]:.3f}, to load all weights",
    ),
    Row(
        "harness",
        "agents as commands in sandboxes: sessions/s per core; overhead per session in ms (below "
        "0: not measurable)",
        "{sessions[sandbox]:.1f}; {added_ms:.1f}",
        "{sessions[keeper]:.1f}, without a sandbox",
    ),
    Row(
        "harness",
        "concurrent sandboxes; MB per sandbox; processes, folders and mounts left after `kill -9` of the "
        "worker",
        "{at_once[sandboxes]}; {at_once[mb_each]:.1f}; {left[processes]}, {left[folders]}, {left[mounts]}",
    ),
    _pipelines(
        "pipelines",
        "all weights written in bfloat16 at {emulation[write_bandwidth]:.2g} B/s, and 1.5 % of the bytes "
        "read by engines",
    ),
    _pipelines("pipelines_deltas", "only 1.5 % of the bytes written and read (not implemented)"),
)


def page(folder: Path = RESULTS) -> str:
    """docs/benchmarks.md: a table for each section, then the machines of the figures."""
    stored = _stored(folder)
    parts = [ABOUT]
    for section, results in SECTIONS.items():
        rows = [row for row in ROWS if row.result in results and row.result in stored]
        if rows:
            parts += [f"## {section}\n", *([NOTES[section]] if section in NOTES else [])]
            parts.append("| measured | ours | baseline, same run | script | at |\n|---|---|---|---|---|")
            parts.append("\n".join(_line(row, stored[row.result]) for row in rows) + "\n")
    machines = dict.fromkeys(_machine(result["machine"]) for result in stored.values())
    return "\n".join([*parts, *(f"On {machine}." for machine in machines)]) + "\n"


def figures(folder: Path = RESULTS) -> str:
    """README's table in Markdown: one figure and one baseline of each part."""
    stored = _stored(folder)
    lines = ["| part | measured | ours | baseline |", "|---|---|---|---|"]
    for part, row in FIGURES.items():
        if row.result in stored:
            cells = " | ".join(_cells(row, stored[row.result]))
            anchor = part.lower().replace(" ", "-")
            lines.append(f"| [{part}](docs/benchmarks.md#{anchor}) | {cells} |")
    return "\n".join(lines)


def _stored(folder: Path) -> dict[str, dict[str, Any]]:
    files = ((row.result, folder / f"{row.result}.json") for row in (*ROWS, *FIGURES.values()))
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files if file.exists()}


def _cells(row: Row, result: dict[str, Any]) -> tuple[str, str, str]:
    line = result["line"]
    try:
        return row.what.format(**line), row.ours.format(**line), row.baseline.format(**line)
    except KeyError as error:
        raise ValueError(
            f"benchmarks/results/{row.result}.json has no {error} in its line, which the row {row.what!r} "
            f"of benchmarks/table.py shows: run python -m benchmarks.results {row.result}"
        ) from None


def _line(row: Row, result: dict[str, Any]) -> str:
    at = f"{result['date'][:10]}, {result['commit'][:7]}"
    script = result["command"].removeprefix("python -m ")
    return f"| {' | '.join(_cells(row, result))} | `{script}` | {at} |"


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} CPU cores and {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, torch {machine['torch']}"
    )


def in_readme(readme: str, inside: str) -> str:
    """README with `inside` between the marks. Raises ValueError if they are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md has no part between {BEGIN!r} and {END!r} for the table")
    return f"{before}{BEGIN}\n{inside}\n{END}{after}"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(in_readme(README.read_text(encoding="utf-8"), figures()), encoding="utf-8")


if __name__ == "__main__":
    main()
