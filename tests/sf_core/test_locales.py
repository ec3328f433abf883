"""What is read from files is the same in every locale: files are in UTF-8."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sf_core.process.import_path import ROOT
from tests.bench.commands import without_time
from tests.bench.waits import patience

TEXT = "naïve Größe 数学 Ærø"
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }} «Übung» 数
{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant «Lösung»
{% endif -%}"""

ENVIRONMENT = """from seamlessflow import Endpoint, Environment, Task


class Greetings(Environment):
    greeting: str

    def tasks(self, split: str, index: int) -> Task:
        return Task(f"greeting-{index}", "greetings", f"{self.greeting} «Gruß» {index}")

    async def agent(self, task: Task, endpoint: Endpoint) -> str:
        return ""

    def reward(self, task: Task, answer: str) -> float:
        return 0.0
"""

READ = """
import json, sys
from sf_core.config.yaml_file import load_config
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.environments.registry import environment_of

config = load_config(sys.argv[1])
renderer = open_renderer(config.policy.model)
prompt = environment_of(config.environment).tasks("train", 0).prompt
text = renderer.render([{"role": "user", "content": prompt}], [])
print(json.dumps([prompt, text, renderer.encode(text).tolist()]))
"""


@pytest.fixture(scope="module")
def latin_1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a locale in ISO-8859-1, which is made for the test."""
    folder = tmp_path_factory.mktemp("locales")
    name = "en_US.ISO-8859-1"
    command = ["localedef", "--inputfile", "en_US", "--charmap", "ISO-8859-1", str(folder / name)]
    if shutil.which("localedef") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine cannot make a locale: install the package locales")
    return {"LC_ALL": name, "LOCPATH": str(folder)}


@pytest.fixture(params=["C", "latin_1"])
def locale(request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables under which Python's default encoding is not UTF-8."""
    named = {"LC_ALL": "C"} if request.param == "C" else request.getfixturevalue(request.param)
    return {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **named}


@pytest.fixture
def configuration(tmp_path: Path, policy_copy: str, model_dir: str) -> Path:
    """A configuration, a template, tasks and a tokenizer with characters beyond ASCII."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(model_dir, name), Path(policy_copy, name))
    Path(policy_copy, "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (tmp_path / "greetings.py").write_text(ENVIRONMENT, encoding="utf-8")
    file = tmp_path / "run.yaml"
    lines = [
        f"# {TEXT}",
        f"policy: {{model: {policy_copy}}}",
        f"environment: {{name: 'greetings:Greetings', settings: {{greeting: '{TEXT}'}}}}",
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def run(configuration: Path, arguments: list[str], variables: dict[str, str]) -> bytes:
    """What Python prints with these arguments in the folder of the configuration."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    path = os.pathsep.join([str(configuration.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, **variables, "PYTHONPATH": path, "COLUMNS": "120"},
        cwd=configuration.parent,
        capture_output=True,
        timeout=patience(60),
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


def test_prompts_have_the_same_ids_in_every_locale(configuration: Path, locale: dict[str, str]) -> None:
    arguments = ["-c", READ, str(configuration)]
    expected = run(configuration, arguments, {"PYTHONUTF8": "1"})
    prompt, text, ids = json.loads(expected)
    assert TEXT in prompt and "«Übung» 数" in text and ids
    assert run(configuration, arguments, locale) == expected


# a plan costs 25 CPU-seconds, most of them in imports
@pytest.mark.parametrize("locale", ["C", pytest.param("latin_1", marks=pytest.mark.nightly)], indirect=True)
def test_a_plan_is_the_same_in_every_locale(configuration: Path, locale: dict[str, str]) -> None:
    arguments = ["-m", "sf_core", "plan", str(configuration), "--set", "train.iterations=3"]
    expected, found = (
        without_time(run(configuration, arguments, variables).decode("latin-1"))
        for variables in ({"PYTHONUTF8": "1"}, locale)
    )
    assert "lag bound" in expected
    assert found == expected
