"""Train one-step and few-step image generators from your own pictures with rectified flow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rectified_flow.condition import Labels as Labels
    from rectified_flow.condition import Vector as Vector
    from rectified_flow.data.build import open_dataset as open_dataset
    from rectified_flow.data.latents import LatentDataset as LatentDataset
    from rectified_flow.data.latents import encode_pictures as encode_pictures
    from rectified_flow.data.oxford_flowers import OxfordFlowersDataset as OxfordFlowersDataset
    from rectified_flow.data.store import ImageDataset as ImageDataset
    from rectified_flow.errors import RunError as RunError
    from rectified_flow.errors import UsageError as UsageError
    from rectified_flow.evaluation.evaluator import Evaluator as Evaluator
    from rectified_flow.flows.flow import Flow as Flow
    from rectified_flow.flows.flow_map import DistilledFlow as DistilledFlow
    from rectified_flow.flows.mean import MeanFlow as MeanFlow
    from rectified_flow.flows.rectified import RectifiedFlow as RectifiedFlow
    from rectified_flow.flows.saved import load_flow as load_flow
    from rectified_flow.networks.unet import Unet as Unet
    from rectified_flow.registry import register as register
    from rectified_flow.runs.config import TrainingConfig as TrainingConfig
    from rectified_flow.spaces.autoencoders import Autoencoder as Autoencoder
    from rectified_flow.spaces.autoencoders import Haar as Haar
    from rectified_flow.spaces.autoencoders import PretrainedAutoencoder as PretrainedAutoencoder
    from rectified_flow.spaces.latents import Latents as Latents
    from rectified_flow.spaces.pixels import Pixels as Pixels
    from rectified_flow.spaces.space import Space as Space
    from rectified_flow.training.callbacks import Callback as Callback
    from rectified_flow.training.callbacks import Measurement as Measurement
    from rectified_flow.training.evaluations import EvaluationHook as EvaluationHook
    from rectified_flow.training.trainer import Trainer as Trainer

_HOMES = {
    "Autoencoder": "spaces.autoencoders",
    "Callback": "training.callbacks",
    "DistilledFlow": "flows.flow_map",
    "EvaluationHook": "training.evaluations",
    "Evaluator": "evaluation.evaluator",
    "Flow": "flows.flow",
    "Haar": "spaces.autoencoders",
    "ImageDataset": "data.store",
    "Labels": "condition",
    "LatentDataset": "data.latents",
    "Latents": "spaces.latents",
    "MeanFlow": "flows.mean",
    "Measurement": "training.callbacks",
    "OxfordFlowersDataset": "data.oxford_flowers",
    "Pixels": "spaces.pixels",
    "PretrainedAutoencoder": "spaces.autoencoders",
    "RectifiedFlow": "flows.rectified",
    "RunError": "errors",
    "Space": "spaces.space",
    "Trainer": "training.trainer",
    "TrainingConfig": "runs.config",
    "Unet": "networks.unet",
    "UsageError": "errors",
    "Vector": "condition",
    "encode_pictures": "data.latents",
    "load_flow": "flows.saved",
    "open_dataset": "data.build",
    "register": "registry",
}
"""The public names and their modules, imported when first used: ``--help`` needs none of them."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
