"""Adapters of rectified-flow-pytorch for the benchmarks: its name, its dataset, and its flow behind our interface."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.data.image_store import ImageDataset
from rectified_flow.networks.conditions import Kinds
from rectified_flow.spaces.pixels import Pixels

PEER = "rectified-flow-pytorch"


class PeerPictures(Dataset[Tensor]):
    """The images in the peer's format: float32 in [0, 1]."""

    def __init__(self, pictures: ImageDataset) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index]["images"] / 255


class PeerFlow(nn.Module):
    """The peer's flow behind our interface, as far as the Evaluator uses it.

    Args:
        dim: channels of its Unet at full resolution.
        image_size: side of the images [px].
    """

    default_steps = 8

    def __init__(self, dim: int, image_size: int) -> None:
        super().__init__()
        from rectified_flow_pytorch import RectifiedFlow as PeerRectifiedFlow
        from rectified_flow_pytorch import Unet as PeerUnet

        shape = (3, image_size, image_size)
        self.conditions: Kinds = {}
        self.space = Pixels(shape)
        self.flow = PeerRectifiedFlow(PeerUnet(dim=dim), data_shape=shape)

    @torch.no_grad()
    def sample(self, count: int, *, steps: int) -> Tensor:
        noise = randomness.randn("sample noise", (count, *(self.space.shape or ())), "cpu")
        images: Tensor = self.flow.sample(count, steps=steps + 1, noise=noise)  # the peer counts times, not intervals
        return images.clamp(0, 1)
