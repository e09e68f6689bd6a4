"""A Wan transformer as the network of a rectified flow: its conditions, its space, its times and its loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import erfc, inf, log, prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rectified_flow import RectifiedFlow, randomness
from rectified_flow.condition import Condition
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import expand
from rectified_flow.flows.times import TimeDistribution
from rectified_flow.latents.space import StoredLatents

TRAINING_TIMESTEPS = 1000
FirstFrame = Literal["none", "tokens", "channels"]
"""How a model takes the first frame: not at all, as latents at time 0, or as further channels of its input."""


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


class GivenFrame(Condition):
    """First frames ``[b, c, f, h, w]``, which are neither dropped nor guided by, as in the pipeline."""

    def none(self, count: int, device: torch.device) -> Tensor:
        """Refuse: a model that takes a first frame always needs one."""
        raise UsageError("the model continues a first frame: give one")

    def none_like(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def embedding(self, dim: int) -> nn.Module:
        """Refuse: the transformer takes frames as they are."""
        raise UsageError("frames are embedded by the transformer")


class WanNetwork(nn.Module):
    """A Wan transformer as the network of a flow. Both have noise at time 1.

    Args:
        transformer: a ``WanTransformer3DModel`` of diffusers.
        empty: embedding of the empty caption ``[tokens, d]``.
        source: origin of the frozen weights, which no checkpoint has.
        first_frame: how the transformer takes the first frame.
    """

    def __init__(self, transformer: Any, empty: Tensor, source: str, first_frame: FirstFrame = "none") -> None:
        super().__init__()
        self.transformer: Any = transformer
        self.frozen_source = source
        self.first_frame = first_frame
        self.conditions: dict[str, Condition] = {"text": Captions(empty)}
        if first_frame != "none":
            self.conditions["given"] = GivenFrame()

    def forward(self, x: Tensor, t: Tensor, text: Tensor, given: Tensor | None = None, **others: Tensor) -> Tensor:
        """Return the velocity.

        Args:
            x: latents ``[b, c, f, h, w]``.
            t: times ``[b]``.
            text: embeddings of captions ``[b, tokens, d]``.
            given: the first frame. For ``tokens``, its latents ``[b, c, 1, h, w]``, which replace those of ``x`` and
                have time 0. For ``channels``, the latents of a clip with the other frames grey, behind the mask of the
                given frame, ``[b, k, f, h, w]``.
            others: unsupported conditions, such as the interval of mean flow, which raise an error.
        """
        if others:
            raise UsageError(f"a Wan transformer does not accept {', '.join(others)}: train it as a rectified flow")
        times = TRAINING_TIMESTEPS * t
        if given is not None and self.first_frame == "channels":
            x = torch.cat((x, given), dim=1)
        elif given is not None:
            x, times = torch.cat((given, x[:, :, 1:]), dim=2), self._token_times(times, x)
        dtype = self.transformer.dtype
        predicted: Tensor = self.transformer(x.to(dtype), times, text.to(dtype), return_dict=False)[0]
        return predicted.float()

    def _token_times(self, times: Tensor, x: Tensor) -> Tensor:
        """Return the time of each token ``[b, f h w / patch]``, frame by frame; 0 in the first frame."""
        patch_size = self.transformer.config.patch_size
        tokens = prod(x.shape[3:]) // prod(patch_size[1:])
        every = times[:, None].repeat(1, x.shape[2] // patch_size[0] * tokens)
        every[:, :tokens] = 0
        return every


class ClipFlow(RectifiedFlow):
    """A rectified flow of clips, whose first frame may be given."""

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared error of the velocity, without the frame that is known if it replaces latents."""
        known = int(self.network.first_frame == "tokens")
        x_t = torch.lerp(x_0, noise, expand(t, x_0))
        error = self.network(x_t, t, **conditions) - (noise - x_0)
        return error[:, :, known:].square().mean()


@dataclass(frozen=True)
class ExpertTimes(TimeDistribution):
    """Times whose logit is normal with mean ``log(shift)`` and deviation 1, on the condition that they are in a range.

    The two experts of a model share the noise levels: each is trained on its range alone.
    """

    shift: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def draw(self, count: int, device: torch.device, purpose: str = "time") -> Tensor:
        """Draw times ``[count]`` in ``[low, high]``, by the inverse of the distribution function."""
        low, high = (_normal_share(_logit(end) - log(self.shift)) for end in (self.low, self.high))
        share = low + (high - low) * randomness.rand(purpose, (count,), device).double()
        t = torch.sigmoid(torch.special.ndtri(share) + log(self.shift)).float()
        return t.clamp(self.low, self.high)


def _logit(t: float) -> float:
    return log(t / (1 - t)) if 0 < t < 1 else (inf if t else -inf)


def _normal_share(z: float) -> float:
    """Return the share of a standard normal distribution below ``z``, accurate also far below 0."""
    return erfc(-z / 2**0.5) / 2
