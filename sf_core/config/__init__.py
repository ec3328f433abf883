"""The settings of a run: their defaults and bounds, and how they are read, refused and documented. The effect
of a setting belongs to the package that reads it."""

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
