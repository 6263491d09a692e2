"""Configurations: frozen nested dataclasses, and JSON both ways. Presets are in `longmoe.presets`.

Every field is a flag of the command line under its dotted path (`--model.kda.num-heads 8`).
"""
from longmoe.configs.data import DataConfig, SourceConfig
from longmoe.configs.mesh import MeshConfig
from longmoe.configs.model import Dtype, KDAConfig, Mixer, MLAConfig, ModelConfig, MoEConfig, ResidualConfig
from longmoe.configs.serialization import from_json, to_json
from longmoe.configs.stages import GateConfig, StageConfig
from longmoe.configs.training import AlertConfig, CheckpointConfig, LogConfig, OptimConfig, TrainConfig

__all__ = ["AlertConfig", "CheckpointConfig", "DataConfig", "Dtype", "GateConfig", "KDAConfig", "LogConfig", "MLAConfig", "MeshConfig", "Mixer", "MoEConfig",
           "ModelConfig", "OptimConfig", "ResidualConfig", "SourceConfig", "StageConfig", "TrainConfig", "from_json", "to_json"]
