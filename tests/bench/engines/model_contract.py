"""The contract of engines whose tokens come from a network, compared with transformers' own forward pass."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sf_core.engines.protocol import WeightsRefusedError
from sf_core.testing.engines import awake, catch, drain, ids_of
from sf_core.testing.model_engines import ModelEngineTests
from sf_core.types import Sampling, WeightsRef
from storage.tensors.weights import FILE_NAME
from tests.bench.engines.scored import score_drawn


@lru_cache(maxsize=8)
def loaded(folder: str) -> Any:
    """The model of a folder in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class FolderEngineTests(ModelEngineTests):
    file_name = FILE_NAME
    """The file of a folder that an engine takes weights from."""
    damaged_folder: Path

    @pytest.fixture(autouse=True)
    def _damaged(self, tmp_path: Path) -> None:
        self.damaged_folder = tmp_path / "damaged"

    def folder(self, version: int) -> str:
        """The model folder with the weights of this version."""
        raise NotImplementedError

    def weights(self, version: int) -> WeightsRef:
        return WeightsRef(version, self.folder(version))

    def logprobs(
        self, version: int, ids: Sequence[int], start: int, sampling: Sampling
    ) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            logits = loaded(self.folder(version))(torch.tensor([[*ids]])).logits[0, start - 1 : -1]
        return score_drawn(logits, ids[start:], sampling)

    def test_weights_of_other_names_or_shapes_are_refused_and_the_old_ones_serve_on(self) -> None:
        expected = self.sample_alone()
        with self.serve() as engine:
            file = self.file_to_damage()
            good = load_file(file)
            name = next(name for name, tensor in good.items() if tensor.dim() == 2 and ".1." in name)
            wrong = (
                {key: tensor for key, tensor in good.items() if key != name},
                good | {name: good[name][:-1].contiguous()},
            )
            for tensors in wrong:
                save_file(tensors, file)
                refused = WeightsRef(1, str(self.damaged_folder))
                assert name in str(catch(lambda: awake(engine, refused), WeightsRefusedError))  # noqa: B023
            engine.submit(self.request("r"))
            assert ids_of(drain(engine)) == expected

    def make_damaged(self) -> WeightsRef:
        file = self.file_to_damage()
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return WeightsRef(1, str(file.parent))

    def file_to_damage(self) -> Path:
        """The file with the weights in a copy of the folder of version 1."""
        shutil.copytree(self.weights(1).uri, self.damaged_folder, dirs_exist_ok=True)
        return self.damaged_folder / self.file_name
