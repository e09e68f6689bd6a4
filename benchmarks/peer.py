"""Adapters of rectified-flow-pytorch for the benchmarks: its dataset, its flows behind our interface, its training."""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.condition import Kinds
from rectified_flow.data.store import ImageDataset
from rectified_flow.runs import checkpoint
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
        self.conditions: Kinds = {}
        self.space = Pixels((3, image_size, image_size))
        self.flow: Any = self._build(dim)

    @torch.no_grad()
    def sample(self, count: int, *, steps: int) -> Tensor:
        """Images in [0, 1]."""
        noise = randomness.randn("sample noise", (count, *(self.space.shape or ())), "cpu")
        return self._draw(noise, steps).clamp(0, 1)

    def _build(self, dim: int) -> nn.Module:
        from rectified_flow_pytorch import RectifiedFlow as PeerRectifiedFlow
        from rectified_flow_pytorch import Unet as PeerUnet

        flow: nn.Module = PeerRectifiedFlow(PeerUnet(dim=dim), data_shape=self.space.shape)
        return flow

    def _draw(self, noise: Tensor, steps: int) -> Tensor:
        images: Tensor = self.flow.sample(len(noise), steps=steps + 1, noise=noise)  # it counts times, not intervals
        return images


class PeerMeanFlow(PeerFlow):
    """The peer's mean flow; in more than one step it integrates its velocity with Euler's method."""

    default_steps = 1

    def _build(self, dim: int) -> nn.Module:
        from rectified_flow_pytorch import Unet as PeerUnet
        from rectified_flow_pytorch.mean_flow import MeanFlow as PeerMeanFlow

        flow: nn.Module = PeerMeanFlow(
            PeerUnet(dim=dim, accept_dest_time=True),
            data_shape=self.space.shape,
            normalize_data_fn=lambda images: 2 * images - 1,
            unnormalize_data_fn=lambda images: (images + 1) / 2,
        )
        return flow

    def _draw(self, noise: Tensor, steps: int) -> Tensor:
        draw = self.flow.sample if steps == 1 else self.flow.slow_sample
        images: Tensor = draw(steps=steps, batch_size=len(noise), noise=noise)
        return images


class Budget:
    """The remaining processor time of a training run."""

    def __init__(self, minutes: float) -> None:
        self.ends = time.process_time() + 60 * minutes

    @property
    def spent(self) -> bool:
        return time.process_time() >= self.ends


def train_peer(
    build: Callable[[], PeerFlow], pictures: ImageDataset, folder: Path, cpu_minutes: float, seed: int
) -> None:
    """Train with the peer's own Trainer and its defaults, and save raw and averaged weights, unless that was done."""
    from rectified_flow_pytorch import Trainer as PeerTrainer

    if checkpoint.list_checkpoints(folder):
        return
    torch.set_num_threads(1)
    set_seed(seed)
    flow, never = build(), 10**9
    places = {"checkpoints_folder": folder.with_name("unused"), "results_folder": folder.with_name("unused")}
    trainer = PeerTrainer(
        flow.flow,
        dataset=PeerPictures(pictures),
        num_train_steps=never,
        save_results_every=never,
        checkpoint_every=never,
        accelerate_kwargs={"cpu": True},
        **{name: str(path) for name, path in places.items()},
    )
    budget, steps = Budget(cpu_minutes), 0
    update = trainer.ema_model.update

    def update_until_the_end() -> None:
        nonlocal steps
        update()
        steps += 1
        if budget.spent:
            raise TimeoutError

    trainer.ema_model.update = update_until_the_end
    hush = contextlib.redirect_stdout(io.StringIO())  # it prints a line per step
    with contextlib.suppress(TimeoutError), hush:
        trainer()
    averaged = build()
    averaged.flow.load_state_dict(trainer.ema_model.ema_model.state_dict())
    weights = {checkpoint.MODEL_FILE: flow.state_dict(), checkpoint.EMA_FILE: averaged.state_dict()}
    images_seen = steps * trainer.dl.batch_sampler.batch_size
    checkpoint.save(folder, steps, weights, {"run.json": {"images": images_seen}})
