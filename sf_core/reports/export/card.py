"""Writes the model card of a trained policy, from the run directory.

The base model, its name and its licence stand there as far as files name them; nothing is guessed. Settings
are shown without paths, addresses and keys of the user.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from sf_core.config import RunConfig
from sf_core.config.yaml_file import find_differences
from sf_core.models.images.processor_config import read_image_processor
from sf_core.models.pretrained.published import PUBLISHED, folder_of
from sf_core.process.environment_variables import ROOT
from sf_core.reports.charts import draw_curve
from sf_core.reports.evaluations.comparison import Comparison, Interval, compare_versions
from sf_core.reports.view import RunView
from storage.files import join, read_if_there, write_atomic

LICENCE_KEYS = ("license", "license_name", "license_link")

_IN_THE_CACHE = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]+/?$")
"""Matches the folder of a model in the cache of huggingface_hub."""


@dataclass(frozen=True, slots=True)
class Base:
    name: str | None = None
    """Name on the Hugging Face Hub; None: it is not known there, or there is no base."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """Entries of the head of a model card; empty if no file tells the licence."""
    is_built_in: bool = False


def find_base(config: RunConfig, start_dir: str) -> Base:
    """The base of a run's policy. `start_dir`: its start folder, with the card of the base if it had one."""
    source = config.policy.model
    if source is None:
        return Base(is_built_in=True)
    for name, published in PUBLISHED.items():
        if source in (name, str(folder_of(name))):
            named = {} if published.licence is None else {"license": published.licence}
            return Base(published.base, named)
    cached = _IN_THE_CACHE.search(source)
    head = read_head(join(start_dir, "README.md"))
    licence = {key: str(head[key]) for key in LICENCE_KEYS if isinstance(head.get(key), str)}
    # without the licence itself, its name and link say nothing
    return Base("/".join(cached.groups()) if cached else None, licence if "license" in licence else {})


def read_head(card: str) -> dict[str, Any]:
    """The head of a model card; empty if there is no card, or its head cannot be read."""
    text = (read_if_there(card) or b"").decode(errors="replace").replace("\r\n", "\n")
    found = re.match(r"---\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        head = YAML(typ="safe", pure=True).load(found[1])
    except (YAMLError, ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def write_head(entries: Mapping[str, Any]) -> str:
    """The head of a model card."""
    text = io.StringIO()
    writer = YAML(pure=True)
    writer.indent(sequence=4, offset=2)
    writer.dump(dict(entries), text)
    return f"---\n{text.getvalue()}---\n"


PRIVATE = ("run_id", "cluster", "dataplane", "storage", "track")
"""Sections that say where a run was computed, not what was computed."""

LEFT_OUT = "(left out)"

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL", re.IGNORECASE)
_SECRET_WORD = re.compile(r"\b(sk|hf|gh[opsu]|xox[abp]|AKIA)[-_A-Za-z0-9]{12,}")
_NAMES_A_FILE = re.compile(r"[/\\]|^~|^\.{1,2}$|@|\.(jsonl?|ya?ml|parquet|csv|txt|pem|env)$")


def public_settings(config: RunConfig) -> dict[str, Any]:
    """Each setting that differs from its default, by its key."""
    differing = find_differences(RunConfig(), config)
    return {
        key: public_value(key, value) for key, _, value in differing if key.partition(".")[0] not in PRIVATE
    }


def public_value(name: str, value: Any) -> Any:
    """The value with whatever may be a path, an address or a key left out; `name` is that of its setting."""
    if isinstance(value, BaseModel):
        return public_value(name, value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(key): public_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [public_value(name, inner) for inner in value]
    if not isinstance(value, str):
        return value
    last = name.rpartition(".")[2]
    # `max_tokens` is a number, and no secret
    if _SECRET.search(last) or _SECRET_WORD.search(value) or _NAMES_A_FILE.search(value):
        return LEFT_OUT
    return value


CARD = "README.md"
CHART = "reward.png"

_MARKED = "written by SeamlessFlow, and replaced as long as it is as written"
_MARK = re.compile(rf"\n<!-- {_MARKED}: ([0-9a-f]{{64}}) -->\n\Z")


def write_card(view: RunView, config: RunConfig) -> bool:
    """Write the card and its chart into the policy folder of a complete run. A card that somebody
    has edited stays as it is: then False is returned."""
    run = view.run
    uri = join(view.run.policy_dir, CARD)
    found = read_if_there(uri)
    # an earlier version copied the card of the base
    is_edited = found is not None and not is_ours(found.decode(errors="replace"))
    if is_edited and found != read_if_there(join(run.start_dir, CARD)):
        return False
    view = view.between(0, config.train.iterations - 1)
    rewards = {iteration.number: iteration.reward for iteration in view.complete_iterations}
    write_atomic(join(run.policy_dir, CHART), draw_curve(rewards, view.held_out))
    comparison = compare_versions(view, 0, config.train.iterations)
    is_multimodal = read_image_processor(run.start_dir) is not None
    text = render_card(
        run.run_id,
        config,
        find_base(config, run.start_dir),
        view.held_out,
        comparison,
        is_multimodal=is_multimodal,
    )
    write_atomic(uri, sign(text).encode())
    return True


def sign(text: str) -> str:
    """The text with the mark by which it is known to be as it was written."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}\n<!-- {_MARKED}: {digest} -->\n"


def is_ours(text: str) -> bool:
    """Whether nobody has edited this card since it was written."""
    found = _MARK.search(text)
    return found is not None and hashlib.sha256(text[: found.start()].encode()).hexdigest() == found[1]


def render_card(
    run_id: str,
    config: RunConfig,
    base: Base,
    held_out: Mapping[int, float],
    comparison: Comparison | None,
    *,
    is_multimodal: bool,
) -> str:
    lora = config.train.lora is not None
    head: dict[str, Any] = {} if base.name is None else {"base_model": base.name}
    head |= base.licence
    head |= {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if is_multimodal else "text-generation",
        "tags": ["seamlessflow", "reinforcement-learning", "llm-agent", *(["lora"] if lora else [])],
    }
    parts = [
        write_head(head),
        f"# {run_id}",
        _about(config, base),
        "## Evaluation",
        _evaluation(config, comparison),
        f"![reward by iteration]({CHART})",
        _curve(held_out),
        "## Use",
        _USE,
        "## Training",
        f"Trained with {describe_version()}, {config.train.iterations} iterations of "
        f"{config.rollout.groups_per_batch} groups with {config.rollout.group_size} sessions each, seed "
        f"{config.seed}. Settings that differ from the defaults, without paths and addresses:",
        _settings(config),
        "## Licence",
        _licence(base),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_REPOSITORY")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPOSITORY")
```"""


def _about(config: RunConfig, base: Base) -> str:
    if base.is_built_in:
        warmed = " and warmed up" if config.policy.warm_steps else ""
        origin = f"a small model that was made{warmed} for this run"
    else:
        origin = f"[{base.name}](https://huggingface.co/{base.name})" if base.name else "a local model folder"
    how = "an adapter (LoRA), merged into the weights here, was" if config.train.lora else "all weights were"
    return (
        f"A policy of an LLM agent, trained with reinforcement learning from {origin}: {how} trained on the "
        f"tasks of {_tasks(config)}."
    )


def _tasks(config: RunConfig) -> str:
    environment = config.environment
    named = f"`{environment.name}`" if environment.tasks is None else f"`{environment.tasks}`"
    return f"the environment {named}" if environment.tasks is None else named


def _evaluation(config: RunConfig, comparison: Comparison | None) -> str:
    if comparison is None or comparison.before is None or comparison.difference is None:
        return "The first and the last version have no stored answers to the same held-out tasks."
    before = comparison.before
    after = comparison.after
    answers = "one answer" if comparison.answers == 1 else f"{comparison.answers} answers"
    assert comparison.interval is not None, "a comparison has it with the difference"
    rows = [
        "| | mean reward | 95 % interval | solved |",
        "|---|---:|---:|---:|",
        f"| before (version {before.version}) | {before.reward:.3f} | {_interval(before.interval)} | "
        f"{before.solved[1]:.1%} |",
        f"| after (version {after.version}) | {after.reward:.3f} | {_interval(after.interval)} | "
        f"{after.solved[1]:.1%} |",
        f"| difference | {comparison.difference:+.3f} | {_interval(comparison.interval, '+.3f')} | |",
    ]
    same = comparison.tasks - comparison.won - comparison.lost
    return (
        f"Measured on {comparison.tasks} held-out tasks of {_tasks(config)}, with {answers} each; no session "
        "of a held-out task is trained on.\n\n" + "\n".join(rows) + "\n\n"
        f"Tasks that earned more after training: {comparison.won}; less: {comparison.lost}; the same: "
        f"{same}. Solved: answers with a reward of at least 1. The intervals are from a bootstrap over the "
        "tasks. They do not cover how runs with other seeds differ."
    )


def _interval(interval: Interval, form: str = ".3f") -> str:
    return f"{interval[0]:{form}} to {interval[1]:{form}}"


def _curve(held_out: Mapping[int, float]) -> str:
    versions = sorted(held_out)
    if not versions:
        return ""
    return "\n".join(
        [
            f"| version | {' | '.join(map(str, versions))} |",
            f"|---|{'---:|' * len(versions)}",
            f"| held-out reward | {' | '.join(f'{held_out[number]:.3f}' for number in versions)} |",
        ]
    )


def _settings(config: RunConfig) -> str:
    lines = [f"{key}: {json.dumps(value)}" for key, value in public_settings(config).items()]
    # a text could hold the fence
    shown = [line.replace("```", "'''") for line in lines] or ["# none"]
    return "\n".join(["```yaml", *shown, "```"])


def _licence(base: Base) -> str:
    if base.licence:
        named = base.licence.get("license_name", base.licence["license"])
        return (
            f"The base has the licence `{named}`, as its own card tells; it covers what is derived from it."
        )
    if base.is_built_in:
        return "No licence is named here. Who publishes this policy chooses one."
    return "The files of the base name no licence, so none is named here. Look it up before you publish."


def describe_version() -> str:
    """The version of SeamlessFlow, and its commit where that is known."""
    try:
        named = f"SeamlessFlow {version('seamlessflow')}"
    except PackageNotFoundError:
        named = "SeamlessFlow"
    commit = find_commit()
    return named if commit is None else f"{named}, commit `{commit}`"


def find_commit() -> str | None:
    """The commit of a clone, or of an installation from a repository; None for a wheel of an index."""
    if os.path.exists(ROOT / ".git"):
        with suppress(OSError, subprocess.SubprocessError):
            head = _git("rev-parse", "HEAD")
            return f"{head} with local changes" if _git("status", "--porcelain", "-uno") else head
    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        origin = distribution("seamlessflow").read_text("direct_url.json")
        return str(json.loads(origin or "")["vcs_info"]["commit_id"])
    return None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, check=True, timeout=30, encoding="utf-8"
    )
    return done.stdout.strip()
