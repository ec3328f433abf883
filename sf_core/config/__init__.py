"""Settings of a run: how they are read and refused. Their effects belong to the code that uses them."""

from sf_core.config.devices import EmulationConfig as EmulationConfig
from sf_core.config.rollout_config import EnvironmentConfig as EnvironmentConfig
from sf_core.config.rollout_config import RolloutConfig as RolloutConfig
from sf_core.config.run_config import DataplaneConfig as DataplaneConfig
from sf_core.config.run_config import PolicyConfig as PolicyConfig
from sf_core.config.run_config import RunConfig as RunConfig
from sf_core.config.run_config import StorageConfig as StorageConfig
from sf_core.config.run_config import WarmstartConfig as WarmstartConfig
from sf_core.config.run_config import WorkerConfig as WorkerConfig
from sf_core.config.train_config import TrainConfig as TrainConfig
