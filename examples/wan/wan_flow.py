"""A Wan transformer as the network of a rectified flow: its conditions, its space and its loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, prod
from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow import RectifiedFlow, randomness, register
from rectified_flow.condition import Condition
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import expand
from rectified_flow.flows.times import TimeDistribution
from rectified_flow.latents.space import StoredLatents

TRAINING_TIMESTEPS = 1000


@register
@dataclass(frozen=True)
class ExpertTimes(TimeDistribution):
    """Shifted logit-normal times on the condition that they lie in the range of an expert, ``[low, high]``."""

    shift: float
    low: float
    high: float

    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        """Draw times ``[count]``."""
        ends = torch.tensor([self.low, self.high], dtype=torch.float64, device=device)
        low, high = torch.special.ndtr(ends.logit() - log(self.shift))
        share = low + (high - low) * randomness.rand(purpose, (count,), device)
        t = torch.sigmoid(torch.special.ndtri(share) + log(self.shift)).float()
        return t.clamp(self.low, self.high)


class ClipLatents(StoredLatents):
    """Latents of clips ``[b, c, f, h, w]``, which the pipeline decodes."""

    def decode(self, x: Tensor) -> Tensor:
        """Return latents as the autoencoder has them."""
        return self.unscaled(x)

    def render(self, data: Tensor) -> Tensor:
        """Refuse to render latents."""
        raise UsageError("latents of clips are rendered by the pipeline")


class Captions(Condition):
    """Embeddings of captions ``[b, tokens, d]``. The embedding of the empty caption stands for "none".

    Args:
        empty: the embedding of the empty caption ``[tokens, d]``.
    """

    def __init__(self, empty: Tensor) -> None:
        self.empty = empty

    def none(self, count: int, device: torch.device) -> Tensor:
        """Return rows of the empty caption."""
        self.empty = self.empty.to(device)
        return self.empty.expand(count, -1, -1)

    def embedding(self, dim: int) -> nn.Module:
        """Refuse: the transformer has its own embedding."""
        raise UsageError("captions are embedded by the transformer")


class WanNetwork(nn.Module):
    """A Wan transformer as the network of a flow. Both have noise at time 1.

    Args:
        transformer: a ``WanTransformer3DModel`` of diffusers.
        empty: embedding of the empty caption ``[tokens, d]``.
        source: origin of the frozen weights, which no checkpoint has.
    """

    def __init__(self, transformer: Any, empty: Tensor, source: str) -> None:
        super().__init__()
        self.transformer: Any = transformer
        self.frozen_source = source
        self.conditions = {"text": Captions(empty)}

    def forward(self, x: Tensor, t: Tensor, text: Tensor, *, known_frames: int = 0, **others: Tensor) -> Tensor:
        """Return the velocity.

        Args:
            x: latents ``[b, c, f, h, w]``.
            t: times ``[b]``.
            text: embeddings of captions ``[b, tokens, d]``.
            known_frames: number of first frames of ``x`` without noise: the time of their tokens is 0.
            others: unsupported conditions, such as the interval of mean flow, which raise an error.
        """
        if others:
            raise UsageError(f"a Wan transformer does not accept {', '.join(others)}: train it as a rectified flow")
        patch_size = self.transformer.config.patch_size
        times = TRAINING_TIMESTEPS * t
        if known_frames:
            frames, tokens = x.shape[2] // patch_size[0], prod(x.shape[3:]) // prod(patch_size[1:])
            times = times[:, None].repeat(1, frames * tokens)
            times[:, : known_frames * tokens] = 0
        dtype = self.transformer.dtype
        predicted: Tensor = self.transformer(x.to(dtype), times, text.to(dtype), return_dict=False)[0]
        return predicted.float()


class ClipFlow(RectifiedFlow):
    """A rectified flow of clips, whose first frame may be given.

    Args:
        network: a :class:`WanNetwork`.
        first_frame: give the first frame without noise, and learn the others.
        settings: settings of :class:`rectified_flow.RectifiedFlow`.
    """

    def __init__(self, network: WanNetwork, *, first_frame: bool, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.first_frame = first_frame

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared error of the velocity, over the frames that are not given."""
        known = int(self.first_frame)
        noisy = torch.lerp(x_0, noise, expand(t, x_0))
        x_t = torch.cat((x_0[:, :, :known], noisy[:, :, known:]), dim=2)
        error = self.network(x_t, t, known_frames=known, **conditions) - (noise - x_0)
        return error[:, :, known:].square().mean()
