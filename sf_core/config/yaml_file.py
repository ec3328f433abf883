"""Configurations as YAML: the files that users write, with `key.path=value` overrides of the command line.
Also the differences between two configurations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from operator import eq, itemgetter
from pathlib import Path
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode

from sf_core.config import RunConfig
from sf_core.config.removed import drop_removed
from sf_core.config.validation import ConfigError, models_of, validate_config, walk
from sf_core.settings import Settings, did_you_mean, quote
from storage.local import open_given

BUILTIN = Path(__file__).parent / "builtin"
"""Folder of the built-in configurations: a link to `configs` in a clone, a folder in a wheel."""

Section = Mapping[str, Any] | Settings


def builtin_configs() -> dict[str, Path]:
    """The files of the built-in configurations, by name; recipes come last."""
    files = [*sorted(BUILTIN.glob("*.yaml")), *sorted(BUILTIN.glob("recipes/*.yaml"))]
    return {file.stem: file for file in files}


def load_config(files: str | Path | Sequence[str | Path], overrides: list[str] | None = None) -> RunConfig:
    """Read YAML files, or the built-in configurations of these names where there are no such files, merge
    later ones over earlier ones, apply `key.path=value` overrides (values are YAML), validate.

    Raises ConfigError with the file, the line, the path of the key and what is allowed.
    """
    paths = [files] if isinstance(files, str | Path) else files
    data: dict[str, Any] = {}
    texts = {}
    for path in paths:
        texts[str(path)], own = read_file(path)
        data = merge_sections(data, own)
    return _override(data, overrides, " ".join(map(str, paths)), texts)


def read_file(path: str | Path) -> tuple[str, dict[str, Any]]:
    """The text of a file or built-in configuration, and its settings. Raises ConfigError."""
    builtin = builtin_configs()
    file = path if os.path.isfile(path) else builtin.get(str(path), path)
    if file is path and (run := _find_run(path)):
        raise ConfigError(
            f"{path} is a run, not a configuration; to continue the run, use `sf resume {run}`; its settings "
            f"are in {run}/config.json"
        )
    try:
        with open_given(file) as opened:
            text = opened.read().decode()
        data = _parse(text) or {}
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; give the path of a YAML file or the name of a built-in configuration: "
            f"{', '.join(builtin)}{did_you_mean(str(path), [*builtin, *_yaml_files_beside(path)])}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except _NoYamlError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {quote(data)}")
    return text, data


def _find_run(path: str | Path) -> str | None:
    """The run directory that was given in place of a configuration: its path, or its name in the default of
    `storage.root`."""
    places = [str(path), os.path.join(RunConfig().storage.root, path)]
    return next((place for place in places if os.path.isfile(os.path.join(place, "config.json"))), None)


def _yaml_files_beside(path: str | Path) -> list[str]:
    """YAML files in the folder of a file that does not exist."""
    return sorted(str(file) for pattern in ("*.yaml", "*.yml") for file in Path(path).parent.glob(pattern))


def override_config(config: RunConfig, overrides: list[str] | None, source: str) -> RunConfig:
    """Apply `key.path=value` overrides to a complete configuration; raises ConfigError like `load_config`."""
    return _override(config.model_dump(mode="json"), overrides, source, {})


def merge_sections(base: Mapping[str, Any], given: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """`base` overridden by the given settings, section by section and not yet validated. Lists, sections of
    another kind, and mappings whose keys the user names, are replaced as a whole."""
    merged = dict(base)
    for name, value in given.items():
        key = f"{within}{name}"
        before = base.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and _goes_on(key, before, value):
            value = merge_sections(before, value, f"{key}.")
        merged[name] = value
    return merged


def _goes_on(key: str, before: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether what is given for a section changes single settings of it."""
    models = models_of(walk(key.split(".")).annotation)
    return bool(models) and (len(models) == 1 or given.get("kind") in (None, before.get("kind")))


def describe_differences(base: Mapping[str, Any], changed: Mapping[str, Any]) -> list[str]:
    """Each setting of `changed` that differs from `base`, or from the default if absent there, in words."""
    default = RunConfig().model_dump(mode="json")
    found = find_differences(merge_sections(default, base), drop_removed(changed))
    return [f"{key} {quote(value)} (deployed: {quote(before)})" for key, before, value in found]


def find_differences(base: Section, changed: Section, within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, former and new value of each setting of `changed` that differs, section by section. Lists, and
    mappings whose keys the user names, are compared as a whole."""
    former = dict(base)
    for name, value in dict(changed).items():
        key = within + name
        before = cast(Any, former.get(name))
        is_section = all(isinstance(side, Mapping | Settings) for side in (before, value))
        # one of several kinds is a value: another kind has other settings
        if is_section and len(models_of(walk(key.split(".")).annotation)) == 1:
            yield from find_differences(before, value, f"{key}.")
        elif value != before:
            yield key, before, value


def _override(
    data: dict[str, Any], overrides: list[str] | None, source: str, texts: Mapping[str, str]
) -> RunConfig:
    for override in overrides or []:
        _apply_override(data, override)
    keys = [override.partition("=")[0].split(".") for override in overrides or []]

    def place_of(path: list[str]) -> str:
        """The file and line, or the option, in which most of this path is written; the last one of them."""
        places = []
        for file, text in texts.items():
            depth, line = _find(text, path)
            places.append((depth, f"{file} line {line}: "))
        for key in keys:
            places.append((len([*takewhile(bool, map(eq, key, path))]), "--set "))
        depth, place = max(reversed(places), key=itemgetter(0), default=(0, ""))
        return place if depth else f"{source}: "

    return validate_config(data, source, place_of)


def _find(text: str, path: list[str]) -> tuple[int, int]:
    """How much of this path a YAML text has, and in which line that ends."""
    node = YAML(pure=True).compose(text)
    line = 0
    for depth, name in enumerate(path):
        items = node.value if isinstance(node, MappingNode) else ()
        at = next((pair for pair in items if pair[0].value == name), None)
        if at is None:
            return depth, line
        node = at[1]
        line = at[0].start_mark.line + 1
    return len(path), line


class _NoYamlError(Exception):
    """The text is not YAML. The message says why, on one line."""


class _Constructor(SafeConstructor):
    """Makes values of YAML 1.2, in which `yes` is a word and 0100 a hundred."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        if key not in mapping:
            return True
        same = (other for other, _ in node.value if other.value == key_node.value)
        lines = [mark.start_mark.line + 1 for mark in (next(same), key_node)]
        raise _NoYamlError(
            f"the key {quote(key)} is in line {lines[0]} and again in line {lines[1]}: merge the two"
        )


def _parse(text: str) -> Any:
    parser = YAML(typ="safe", pure=True)
    parser.Constructor = _Constructor
    try:
        return parser.load(text)
    except RecursionError:
        raise _NoYamlError("nested too deeply") from None
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise _NoYamlError(line + " ".join(filter(None, (error.context, error.problem)))) from None
    except (YAMLError, ValueError) as error:
        # a plain ValueError for a date that does not exist or a malformed number
        raise _NoYamlError(" ".join(str(error).split())) from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, sep, text = override.partition("=")
    if not sep or not path:
        raise ConfigError(f"--set {override}: expected key.path=value")
    try:
        value = _parse(text)
    except _NoYamlError:
        raise ConfigError(f"--set {path}: {quote(text)} is not a valid YAML value") from None
    *parents, leaf = names = path.split(".")
    node = data
    if names[:2] == ["cluster", "workers"] and len(names) > 2:
        _write_workers(data)
    for at, name in enumerate(parents, start=1):
        child = node.get(name)
        if child is None:
            child = node[name] = {}
        if isinstance(child, list):
            whole = ".".join(names[:at])
            raise ConfigError(
                f"--set {override}: {name} is a list: give the whole list, as --set {whole}=[...]"
            )
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a section")
        node = child
    node[leaf] = value


def _write_workers(data: dict[str, Any]) -> None:
    """Write the workers of the default where none are given, so that one of them can be edited."""
    cluster = data.get("cluster") or {}
    if isinstance(cluster, dict) and cluster.get("workers") is None:
        default = RunConfig().model_dump(mode="json", include={"cluster": {"workers"}})
        data["cluster"] = cluster | default["cluster"]
