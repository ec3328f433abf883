from pathlib import Path

import pyarrow as pa
import pytest

from sf_core.config.devices import WorkerDevice
from sf_core.models.builtin import make_policy
from sf_core.recipes.losses import LossConfig
from sf_core.stages.run import OpenRun, RunRef
from sf_core.testing.trainers import TrainerTests
from sf_core.training.torch.trainer import ModelTrainer
from storage.run_directory import RunDirectory
from tests.bench.runs import configure
from tests.bench.training.batches import grouped_rows, make_batch


class TestContract(TrainerTests):
    @pytest.fixture(autouse=True, params=["float32", "bfloat16"])
    def _in(self, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        from sf_core.training.megatron.backend import MegatronBackend  # takes seconds

        self.backend = MegatronBackend(WorkerDevice())
        self.directory = RunDirectory(str(tmp_path / "run"))
        policy = {"hidden_size": 32, "num_layers": 1, "warmstart": None, "dtype": request.param}
        config = configure(
            self.directory, policy=policy, train={"checkpoint_every": 2, "backend": "megatron"}
        )
        make_policy(self.directory.start_dir, config.policy, config.seed)

    def begin(self, attempt: int) -> OpenRun:
        return OpenRun(RunRef("run", self.directory.uri, dataplane_url="", attempt=attempt))

    def batch(self, iteration: int) -> pa.Table:
        return make_batch(grouped_rows(4, 4), logprob=-4.0, group_size=4, version=iteration, seed=iteration)

    def test_the_start_is_the_reference_of_a_penalty(self) -> None:
        changed = self.begin(attempt=1).config.train.model_copy(
            update={"loss": LossConfig.model_validate({"kl": {"coefficient": 0.1}})}
        )
        with self._trainer(self.begin(attempt=1), 0) as trainer:
            assert isinstance(trainer, ModelTrainer)
            trainer.config = changed
            found = [trainer.step(self.batch(number))["kl_reference"] for number in range(2)]
        assert found[0] == 0 and found[1] > 0
