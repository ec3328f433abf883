"""The runs of a sweep, from the options of `--set` and the number of seeds; and the request for a sweep,
which is the form of its deployment and what the command passes to the flow. Starts and stores nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import SequenceNode

from sf_core.config import RunConfig
from sf_core.config.validation import ConfigError
from sf_core.config.yaml_file import load_config
from sf_core.settings import Settings
from sf_core.stages.sweeps.sweep import OpenSweep, Setting, Sweep, SweepFolder, SweepName, SweepRun
from storage.files import absolute

MOST_SEEDS = 1000


class SweepRequest(Settings):
    """One run for each combination of values and each seed."""

    config: str | None = Field("quickstart", min_length=1)
    """Name of a built-in configuration, or path of a YAML file where the flow runs. Empty: the sweep `name`
    goes on as it is stored."""
    seeds: int = Field(3, ge=1, le=MOST_SEEDS)
    """Number of seeds per setting. They count from the `seed` of the configuration."""
    settings: tuple[str, ...] = ()
    """Settings to vary, one per line, each with its values: train.learning_rate=1e-3,3e-3. All combinations
    of the values are run. A setting with one value is changed in all runs."""
    name: SweepName | None = None
    """Name of the sweep, with which the names of its runs begin. A sweep of this name goes on: its finished
    runs are not repeated. Empty: the name is made of the configuration and the settings."""
    at_once: int | None = Field(None, ge=1, le=1000)
    """Maximum number of runs at a time. Empty: as many as there are equal shares of the workers on which the
    configuration can run."""
    root: str | None = Field(None, min_length=1)
    """Folder of the runs, `storage.root`. Empty: that of the configuration."""

    @property
    def shown_name(self) -> str:
        """Name of the flow run."""
        return f"sweep-{self.name or self.config}"

    def open(self) -> OpenSweep:
        """The stored sweep, made or extended if a configuration is named. Raises ConfigError or ValueError,
        one sentence."""
        if self.config is None:
            if self.name is None:
                raise ConfigError("a sweep needs a config to begin, or the name of a stored sweep to go on")
            return OpenSweep.read(SweepFolder(absolute(self.root or "runs"), self.name))
        expanded = expand(self.config.split(), self.settings, self.seeds, self.name)
        root = absolute(self.root or expanded.root)
        folder = SweepFolder(root, expanded.name)
        return OpenSweep(folder, folder.put(expanded))


SHORT = {"learning_rate": "lr"}
"""Words of the field for names of settings."""

MAX_VALUE = 24
"""Most characters of a value in the name of a run."""

NOT_SWEPT = ("cluster", "dataplane", "storage", "track")
"""Sections of which a sweep has one value: all its runs share a stack and a place."""


_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters that names of runs do not have."""


@dataclass(frozen=True, slots=True)
class Values:
    """One `--set`: the values that a setting takes in turn, as YAML."""

    key: str
    texts: tuple[str, ...]


def parse_values(override: str) -> Values:
    """Split KEY=VALUE,VALUE at the commas that YAML would split a list at: not within quotes, brackets or
    braces. Raises ConfigError without a key or an equals sign."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"--set {override}: expected key.path=value, or key.path=value,value")
    return Values(key, _split(text))


def _split(text: str) -> tuple[str, ...]:
    listed = f"[{text}]"
    try:
        node = YAML(pure=True).compose(listed)
    except (YAMLError, RecursionError):
        # one value, which the configuration refuses in its own words
        return (text,)
    # a bracket within the text may have closed the list
    is_list = isinstance(node, SequenceNode) and node.end_mark.index == len(listed)
    if not is_list or not node.value:
        return (text,)
    texts = (listed[item.start_mark.index : item.end_mark.index].strip() for item in node.value)
    return tuple(dict.fromkeys(texts))


def expand(
    files: Sequence[str | Path],
    overrides: Sequence[str],
    seeds: int,
    name: str | None = None,
    check: Callable[[RunConfig], None] = lambda _: None,
) -> Sweep:
    """A sweep with a run for each combination of values and each seed; seeds count from that of the
    configuration. A setting whose configuration is refused, also by `check`, has the refusal, and no runs.

    Raises ConfigError if all are refused, or if an option is none that a sweep can have."""
    # as in `sf train`, the last one counts
    overridden = {values.key: values for values in map(parse_values, overrides)}
    swept = [values for values in overridden.values() if len(values.texts) > 1]
    _check_keys(overridden, swept)
    fixed = [f"{values.key}={values.texts[0]}" for values in overridden.values() if values not in swept]
    named = name or _name(files, swept)
    slugs = [dict(zip(values.texts, _slugs(values), strict=True)) for values in swept]
    settings = list[Setting]()
    runs = list[SweepRun]()
    for texts in itertools.product(*(values.texts for values in swept)):
        chosen = {values.key: text for values, text in zip(swept, texts, strict=True)}
        combination = [f"{key}={text}" for key, text in chosen.items()]
        try:
            config = load_config(files, [*fixed, *combination])
            check(config)
        except (ValueError, OSError) as error:
            settings.append(Setting(values=chosen, fault=str(error)))
            continue
        setting = Setting(values=chosen)
        settings.append(setting)
        ending = "-".join(slug[text] for slug, text in zip(slugs, texts, strict=True))
        base = "-".join(filter(None, [named, ending]))
        runs += [_run(base, setting, config, config.seed + number) for number in range(seeds)]
    if not runs:
        raise ConfigError(str(settings[0].fault))
    # one seed of every setting comes before the next seed, so that a sweep that is stopped has compared all
    runs.sort(key=lambda run: run.seed)
    return Sweep(name=named, settings=settings, runs=runs)


def _name(files: Sequence[str | Path], swept: Sequence[Values]) -> str:
    """Name of a sweep that the user has not named: the same for the same command."""
    words = [Path(str(files[-1])).stem, *(short_name(values.key) for values in swept)]
    return _NO_NAME.sub("_", "-".join(words if swept else [*words, "seeds"])).lstrip("._-")


def _check_keys(overridden: dict[str, Values], swept: Sequence[Values]) -> None:
    for values in overridden.values():
        if values.key == "seed":
            raise ConfigError("--set seed: the seeds of a sweep are set by --seeds N; leave --set seed out")
        if values.key == "run_id":
            raise ConfigError(
                "--set run_id: the runs of a sweep are named after the sweep; give its name as --name NAME"
            )
    for values in swept:
        section = values.key.split(".")[0]
        if section in NOT_SWEPT:
            raise ConfigError(
                f"--set {values.key}: all runs of a sweep share one {section}, so give this setting one "
                "value; a value that is a list is written in brackets"
            )


def _run(base: str, setting: Setting, config: RunConfig, seed: int) -> SweepRun:
    run_id = f"{base}-seed{seed}"
    try:
        named = RunConfig.model_validate(config.model_dump() | {"run_id": run_id, "seed": seed})
    except ValueError:
        raise ConfigError(
            f"a run of this sweep would be named {run_id}, but a name has at most 100 letters, digits, `.`, "
            "`_` and `-`, the first a letter or digit: give the sweep another name with --name NAME"
        ) from None
    return SweepRun(run_id=run_id, setting=setting.label, seed=seed, config=named.model_dump(mode="json"))


def short_name(key: str) -> str:
    """A setting in the name of a run or a picture.

    >>> short_name("train.learning_rate"), short_name("rollout.group_size")
    ('lr', 'group_size')
    """
    last = key.rpartition(".")[2]
    return SHORT.get(last, last)


def _slugs(values: Values) -> list[str]:
    """The values of a setting in names of runs: readable, and different from each other."""
    name = short_name(values.key)
    plain = [_NO_NAME.sub("_", text).strip("_") for text in values.texts]
    cut = [text[:MAX_VALUE] for text in plain]
    if len(set(cut)) == len(cut) and all(cut):
        return [f"{name}{text}" for text in cut]
    return [f"{name}-{number}" for number in range(1, len(cut) + 1)]
