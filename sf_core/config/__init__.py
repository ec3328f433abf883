"""What a user can set, and how it is read and refused. What a setting does stands with the thing it sets."""

from sf_core.config.run_config import (
    ClusterConfig,
    DataplaneConfig,
    EmulationConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluateConfig,
    PolicyConfig,
    RolloutConfig,
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
