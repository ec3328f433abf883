from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from sf_core.config.devices import WorkerDevice
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.testing import TrainerTests
from sf_core.training.torch.backend import TorchBackend
from storage.run_directory import RunDirectory
from tests.bench.runs import configure
from tests.bench.trained_runs import start
from tests.bench.training.batches import grouped_rows, make_batch


class TestContract(TrainerTests):
    @pytest.fixture(
        autouse=True,
        params=[
            (1, "float32", {}),
            (2, "float32", {}),
            (2, "bfloat16", {}),
            (2, "float32", {"lora": {}}),
            (2, "bfloat16", {"lora": {}}),
        ],
        ids=lambda param: f"a checkpoint every {param[0]}, {param[1]}{', an adapter' * bool(param[2])}",
    )
    def _in(self, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        self.backend = TorchBackend(WorkerDevice())
        self.directory = RunDirectory(str(tmp_path / "run"))
        every, dtype, lora = request.param
        policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": dtype}
        start(
            self.directory, configure(self.directory, policy=policy, train={"checkpoint_every": every} | lora)
        )

    def begin(self, attempt: int) -> OpenRun:
        return OpenRun(RunRef("run", self.directory.uri, dataplane_url="", attempt=attempt))

    def batch(self, iteration: int) -> pa.Table:
        return make_batch(grouped_rows(4, 4), logprob=-4.0, group_size=4, version=iteration, seed=iteration)
