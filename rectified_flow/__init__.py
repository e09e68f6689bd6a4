"""Train one-step and few-step image generators from your own pictures with rectified flow."""

from rectified_flow.data import OxfordFlowersDataset, open_dataset
from rectified_flow.errors import UsageError
from rectified_flow.flows import Flow, MeanFlow, RectifiedFlow
from rectified_flow.networks import Unet
from rectified_flow.training import MeanFlowConfig, RectifiedFlowConfig, Trainer, TrainingConfig

__all__ = [
    "Flow",
    "MeanFlow",
    "MeanFlowConfig",
    "OxfordFlowersDataset",
    "RectifiedFlow",
    "RectifiedFlowConfig",
    "Trainer",
    "TrainingConfig",
    "Unet",
    "UsageError",
    "open_dataset",
]
