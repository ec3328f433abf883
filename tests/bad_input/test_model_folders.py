"""Model folders that would run foreign code when read: pickled weights, modules of their own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
import torch

from sf_core.config import PolicyConfig, RunConfig
from sf_core.dataplane.chat.template import ChatTemplate
from sf_core.engines.torch.cached_model import open_model
from sf_core.models.builtin import make_policy
from sf_core.models.tokenizer import open_tokenizer
from sf_core.stages.start import prepare_start
from sf_core.training.torch.network import Network
from storage.run_directory import RunDirectory
from storage.tensors.weights import load_weights
from tests.bench.commands import check_refused
from tests.bench.refusals import clear_refusal


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._mark,)


@pytest.fixture
def trapped_model(tmp_path: Path) -> Path:
    """Folder of a policy whose weights are a pickled Trap."""
    folder = tmp_path / "model"
    make_policy(str(folder), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    return folder


LOADERS: dict[str, Callable[[str], object]] = {
    "trainer": Network,
    "engine": lambda folder: open_model(
        folder, folder, context_length=64, dtype=torch.float32, device=torch.device("cpu")
    ),
    "weights": load_weights,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_pickled_weights_are_not_read(trapped_model: Path, loader: str) -> None:
    with pytest.raises((ValueError, OSError)):
        LOADERS[loader](str(trapped_model))
    assert not (trapped_model.parent / "sprung").exists()


def test_a_run_does_not_start_from_pickled_weights(trapped_model: Path) -> None:
    config = trapped_model.parent / "run.yaml"
    config.write_text(f"policy:\n  model: {trapped_model}\n", encoding="utf-8")
    check_refused(
        trapped_model.parent, ["train", str(config)], "policy.model", str(trapped_model), "*.safetensors"
    )
    with clear_refusal(str(trapped_model)):
        prepare_start(
            str(trapped_model.parent / "start"), RunConfig(policy=PolicyConfig(model=str(trapped_model)))
        )
    assert not (trapped_model.parent / "start").exists()


def test_pickles_beside_safe_weights_stay_where_they_are(trapped_model: Path) -> None:
    make_policy(str(trapped_model), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    start = trapped_model.parent / "start"
    prepare_start(str(start), RunConfig(policy=PolicyConfig(model=str(trapped_model))))
    assert {path.suffix for path in start.iterdir()} <= {".json", ".safetensors", ".jinja"}
    Network(str(start))
    assert not (trapped_model.parent / "sprung").exists()


def test_a_run_starts_from_a_folder_of_links(trapped_model: Path) -> None:
    make_policy(str(trapped_model), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    snapshot = trapped_model.parent / "snapshot"
    start = trapped_model.parent / "start"
    snapshot.mkdir()
    for path in trapped_model.iterdir():
        (snapshot / path.name).symlink_to(path)
    prepare_start(str(start), RunConfig(policy=PolicyConfig(model=str(snapshot))))
    assert not any(path.is_symlink() for path in start.iterdir())
    Network(str(start))


def test_weights_that_are_no_files_are_refused_before_anything_is_copied(trapped_model: Path) -> None:
    start = trapped_model.parent / "start"
    config = RunConfig(policy=PolicyConfig(model=str(trapped_model)))
    (trapped_model / "._model.safetensors").write_bytes(b"what an archive of another system leaves")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        prepare_start(str(start), config)
    (trapped_model / "model.safetensors").symlink_to(trapped_model / "blob")
    with pytest.raises(ValueError, match=r"/model\.safetensors is a link to a file that does not exist$"):
        prepare_start(str(start), config)
    assert not start.exists()


def test_code_in_a_model_folder_is_not_run(trapped_model: Path) -> None:
    make_policy(str(trapped_model), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    (trapped_model / "modeling.py").write_text(
        f"open({str(trapped_model.parent / 'sprung')!r}, 'w')\nModel = Tokenizer = None\n", encoding="utf-8"
    )
    for name, entry in (
        ("config.json", {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["modeling.Tokenizer", None]}),
    ):
        values = json.loads((trapped_model / name).read_bytes())
        (trapped_model / name).write_text(json.dumps(values | {"auto_map": entry}), encoding="utf-8")
    for load in (Network, LOADERS["engine"]):
        load(str(trapped_model))
    run = RunDirectory(str(trapped_model.parent / "run"))
    Path(run.uri).mkdir()
    trapped_model.rename(run.start_dir)
    open_tokenizer(run)
    assert not (trapped_model.parent / "sprung").exists()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ strftime_now.__globals__['__builtins__'].open('MARK', 'w') }}",
    "{{ raise_exception.__globals__.json }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__}'.format(messages) | length / 0 }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_of_python(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(source.replace("MARK", str(tmp_path / "sprung")))
    with pytest.raises(jinja2.TemplateError):
        template.render([{"role": "user", "content": "hi"}], [], {}, None)
    assert not (tmp_path / "sprung").exists()
