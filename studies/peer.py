"""Adapters of rectified-flow-pytorch: its data, its flows behind the interface of an evaluation, its training."""

import contextlib
import io
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import Dataset

from rectified_flow import ImageDataset, Pixels, randomness
from studies.harness import CLOCKS, Figures, Row
from studies.training import ENDLESS, measure_samples, open_pictures, write_trained

PEER = "rectified-flow-pytorch"
WEIGHTS = ("averaged weights", "last weights")
"""The peer's Trainer samples with averaged weights; its average is meant for longer runs."""


class PeerPictures(Dataset[Tensor]):
    """The images in the peer's format: float32 in [0, 1]."""

    def __init__(self, pictures: ImageDataset) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index]["images"] / 255


class PeerFlow(nn.Module):
    """The peer's flow behind the interface that an evaluation needs.

    Args:
        dim: channels of its Unet at full resolution.
        image_size: side of the images [px].
    """

    default_steps = 8

    def __init__(self, dim: int, image_size: int) -> None:
        super().__init__()
        self.conditions: dict[str, Any] = {}
        self.space = Pixels((3, image_size, image_size))
        self.flow: Any = self._build(dim)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @torch.no_grad()
    def sample(self, count: int, *, steps: int) -> Tensor:
        """Return images ``[count, 3, h, w]`` in [0, 1]."""
        noise = randomness.randn("sample noise", (count, *(self.space.shape or ())), self.device)
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


def train_peer(row: Row, kind: type[PeerFlow], dim: int) -> None:
    """Train with the peer's own Trainer and its defaults until the budget is spent, and save both kinds of weights.

    The peer's Trainer cannot resume the order of its data, so that a training that was cut short starts anew.
    """
    from rectified_flow_pytorch import Trainer as PeerTrainer

    set_seed(row.seed)
    flow, unused, clock = kind(dim, row.image_size), str(row.folder / "unused"), CLOCKS[row.clock]
    trainer = PeerTrainer(
        flow.flow,
        dataset=PeerPictures(open_pictures(row.data, row.image_size)),
        num_train_steps=ENDLESS,
        save_results_every=ENDLESS,
        checkpoint_every=ENDLESS,
        checkpoints_folder=unused,
        results_folder=unused,
        accelerate_kwargs={"cpu": row.clock == "processor"},
    )
    began, steps, update = clock(), 0, trainer.ema_model.update

    def update_until_the_end() -> None:
        nonlocal steps
        update()
        steps += 1
        if clock() - began >= 60 * row.budget:
            raise TimeoutError

    trainer.ema_model.update = update_until_the_end
    with contextlib.suppress(TimeoutError), contextlib.redirect_stdout(io.StringIO()):  # it prints a line per step
        trainer()
    for name, module in zip(WEIGHTS, (trainer.ema_model.ema_model, flow.flow), strict=True):
        torch.save(module.state_dict(), row.folder / f"{name}.pt")
    write_trained(row, steps * trainer.dl.batch_sampler.batch_size, clock() - began)


def measure_peer(row: Row, kind: type[PeerFlow], dim: int, steps: tuple[int, ...]) -> Figures:
    """Return the figures of both kinds of weights, for each number of steps if there are several."""
    figures: dict[str, Any] = {}
    for name in WEIGHTS:
        flow = kind(dim, row.image_size)
        flow.flow.load_state_dict(torch.load(row.folder / f"{name}.pt", weights_only=True))
        calls = {f"{each} call{'s' * (each > 1)}": {"steps": each} for each in steps}
        ways = {name: {"steps": steps[0]}} if len(steps) == 1 else calls
        if len(steps) > 1 and name == WEIGHTS[1]:
            ways = {f"{way}, {name}": how for way, how in calls.items()}
        figures |= measure_samples(row, flow.eval(), ways)
    return figures
