"""Training: flags, the loop, and what a run leaves on disk."""

from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.flow_configs import MeanFlowConfig, RectifiedFlowConfig
from rectified_flow.training.trainer import Trainer

__all__ = ["MeanFlowConfig", "RectifiedFlowConfig", "Trainer", "TrainingConfig"]
