import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import sf_core
from sf_core.config import PolicyConfig, WarmstartConfig
from sf_core.policy import make_policy
from sf_core.policy_folders import _recipe_files, export_policy
from sf_core.run import Run, RunRef
from sf_core.stages import start
from sf_core.training.warmstart import warmstart
from storage import files
from storage.run_directory import RunDirectory
from storage.weights import load_weights, save_weights
from tests.sf_core.runs import configure


def test_an_export_that_was_cut_off_is_done_again_as_a_whole(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    configure(directory)
    save_weights(directory.start_dir, {"w": torch.ones(2)}, 0)
    for name in ("config.json", "tokenizer.json"):
        files.write_atomic(f"{directory.start_dir}/{name}", b"{}")
    files.write_atomic(f"{directory.policy_dir}/config.json", b"{}")
    export_policy(Run(RunRef("run", directory.uri, dataplane_url="", attempt=1)))
    names = [uri.rsplit("/", 1)[1] for uri in files.list_files(directory.policy_dir)]
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert load_weights(directory.policy_dir)["w"].tolist() == [1.0, 1.0]


def test_an_emulated_run_exports_no_policy(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    configure(directory, engine={"kind": "emulated"})
    save_weights(directory.start_dir, {"w": torch.ones(2)}, 0)
    export_policy(Run(RunRef("run", directory.uri, dataplane_url="", attempt=1)))
    assert files.list_files(directory.policy_dir) == []


def test_a_run_does_not_go_on_from_a_start_folder_that_was_changed(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path / "run"))
    configure(directory)
    ref = RunRef("run", directory.uri, dataplane_url="", attempt=1)
    data = start(ref)
    assert Path(data["source"]).is_dir() and start(ref) == data
    tokenizer = Path(directory.start_dir) / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(ValueError, match=r"tokenizer\.json: content differs from what start wrote"):
        start(ref)


def test_the_cache_of_warm_starts_knows_all_of_our_code_that_makes_them(tmp_path: Path) -> None:
    ran: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        ran.add(frame.f_code.co_filename)

    tracer = sys.gettrace()
    sys.settrace(note)
    try:
        make_policy(str(tmp_path), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
        warmstart(str(tmp_path), WarmstartConfig(steps=1, batch_size=4), seed=0)
    finally:
        sys.settrace(tracer)
    ours = {file for file in map(Path, ran) if file.is_relative_to(sf_core.__path__[0])}
    assert {file.stem for file in ours} >= {"network", "decoder", "tool_loop"}
    assert ours <= set(_recipe_files())
