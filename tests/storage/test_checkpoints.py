from typing import Any

import pytest
import torch

from storage import files
from storage.checkpoints import has_checkpoint, load_checkpoint, save_checkpoint
from storage.run_directory import RunDirectory


def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))


def step(model: torch.nn.Linear, optimizer: torch.optim.AdamW, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        model(torch.arange(3.0)).square().sum().backward()
        optimizer.step()


def test_training_goes_on_bit_for_bit_from_a_checkpoint(run: RunDirectory) -> None:
    model, optimizer = make()
    step(model, optimizer, 3)
    save_checkpoint(run.checkpoint_dir(3), model.state_dict(), optimizer.state_dict(), {"version": 3})
    step(model, optimizer, 2)

    resumed, other = make()
    checkpoint = load_checkpoint(run.checkpoint_dir(3))
    resumed.load_state_dict(checkpoint.model)
    other.load_state_dict(checkpoint.optimizer)
    step(resumed, other, 2)
    assert checkpoint.state == {"version": 3}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_optimizer_state_by_parameter_name_and_plain_numbers_are_kept(run: RunDirectory) -> None:
    optimizer: dict[str, Any] = {
        "state": {"layer.0.weight": {"step": 3, "exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 0.1, "params": ["layer.0.weight"]}],
    }
    save_checkpoint(run.checkpoint_dir(0), {}, optimizer, {})
    loaded = load_checkpoint(run.checkpoint_dir(0)).optimizer
    assert loaded["param_groups"] == optimizer["param_groups"]
    assert loaded["state"]["layer.0.weight"]["step"] == 3
    assert torch.equal(loaded["state"]["layer.0.weight"]["exp_avg"], torch.ones(2))


def test_state_json_written_last_makes_it_complete(run: RunDirectory) -> None:
    model, optimizer = make()
    folder = run.checkpoint_dir(1)
    assert not has_checkpoint(folder)
    refs = save_checkpoint(folder, model.state_dict(), optimizer.state_dict(), {})
    assert has_checkpoint(folder)
    assert refs[-1].uri == f"{folder}/state.json"
    files.remove(refs[-1].uri)
    assert not has_checkpoint(folder)
    with pytest.raises(ValueError, match="no complete checkpoint here"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_damaged_files_are_named(run: RunDirectory, name: str) -> None:
    model, optimizer = make()
    step(model, optimizer, 1)
    folder = run.checkpoint_dir(1)
    save_checkpoint(folder, model.state_dict(), optimizer.state_dict(), {})
    uri = f"{folder}/{name}"
    files.write_atomic(uri, files.read_bytes(uri)[:-1])
    with pytest.raises(ValueError, match=f"{name}: .* differ from"):
        load_checkpoint(folder)
    files.remove(uri)
    with pytest.raises(ValueError, match=f"{name}: missing from the checkpoint"):
        load_checkpoint(folder)


def test_a_damaged_state_file_is_named(run: RunDirectory) -> None:
    folder = run.checkpoint_dir(1)
    save_checkpoint(folder, {}, {"state": {}, "param_groups": []}, {})
    files.write_atomic(f"{folder}/state.json", b'{"state"')
    with pytest.raises(ValueError, match=r"state\.json: no state of a checkpoint: Invalid JSON"):
        load_checkpoint(folder)
