"""Settings of a run: how they are read and refused. Their effects belong to the code that uses them."""

from sf_core.config.rollout_config import EnvironmentConfig, RolloutConfig
from sf_core.config.run_config import (
    ClusterConfig,
    DataplaneConfig,
    EmulationConfig,
    EngineConfig,
    EvaluateConfig,
    PolicyConfig,
    RunConfig,
    RunnersConfig,
    StorageConfig,
    TrackConfig,
    TrainConfig,
    WarmstartConfig,
    WorkerConfig,
)

__all__ = [
    "ClusterConfig",
    "DataplaneConfig",
    "EmulationConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluateConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "RunnersConfig",
    "StorageConfig",
    "TrackConfig",
    "TrainConfig",
    "WarmstartConfig",
    "WorkerConfig",
]
