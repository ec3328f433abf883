from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from sf_core.config.devices import WorkerDevice
from sf_core.stages.run import OpenRun, RunRef
from sf_core.testing.trainers import TrainerTests
from sf_core.training.torch.backend import TorchBackend
from storage.run_directory import RunDirectory
from tests.bench import training
from tests.bench.runs import configure
from tests.bench.trained_runs import start


class TestContract(TrainerTests):
    @pytest.fixture(
        autouse=True,
        params=[
            (1, "float32", {}),
            (2, "float32", {}),
            (2, "bfloat16", {}),
            (2, "float32", {"lora": {}}),
            (2, "bfloat16", {"lora": {}}),
            (2, "float32", {}, True),
            (2, "bfloat16", {}, True),
            (2, "float32", {"lora": {}}, True),
        ],
        ids=lambda param: (
            f"a checkpoint every {param[0]}, {param[1]}{', an adapter' * bool(param[2])}"
            f"{', images' * (len(param) > 3)}"
        ),
    )
    def _in(self, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        self.backend = TorchBackend(WorkerDevice())
        self.directory = RunDirectory(str(tmp_path / "run"))
        every, dtype, lora, *sees = request.param
        self.sees = bool(sees)
        policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": dtype, "sees": self.sees}
        start(
            self.directory, configure(self.directory, policy=policy, train={"checkpoint_every": every} | lora)
        )

    def begin(self, attempt: int) -> OpenRun:
        return OpenRun(RunRef("run", self.directory.uri, dataplane_url="", attempt=attempt))

    def batch(self, iteration: int) -> pa.Table:
        if self.sees:
            rows = [[([3, name, 2], 4), ([1, "2", 1], 3)] for name in "0104"]
            places = self.directory.start_dir, self.directory.media_dir
            return training.images.multimodal_batch(
                *places, rows, group_size=4, version=iteration, seed=iteration
            )
        return training.batches.make_batch(
            training.batches.grouped_rows(4, 4), logprob=-4.0, group_size=4, version=iteration, seed=iteration
        )
