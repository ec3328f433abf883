from pathlib import Path

import pytest
import torch

from sf_core.policy_folders import export_policy
from sf_core.run import Run, RunRef
from sf_core.stages import start
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
