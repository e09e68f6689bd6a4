"""A network of one's own that a plan sizes: a transformer on patches, in one file."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from rectified_flow import Network, register
from rectified_flow.condition import ConditionSpecs


@register(role="network", needs=("shape", "conditions"))
class PatchTransformer(Network):
    """Attention among patches of ``patch`` x ``patch`` values, in any number of layers."""

    widths: ClassVar[Mapping[int, int]] = {32: 0, 64: 20_000, 128: 200_000}

    def __init__(
        self, shape: Sequence[int], conditions: ConditionSpecs, width: int = 32, layers: int = 2, patch: int = 2
    ) -> None:
        super().__init__()
        self.shape, self.conditions = tuple(shape), dict(conditions)
        self.width, self.layers, self.patch = width, layers, patch
        channels, height, side = self.shape
        self.into = nn.Linear(channels * patch**2, width)
        self.place = nn.Parameter(0.02 * torch.randn(height * side // patch**2, width))
        self.times = nn.Linear(2, width)
        self.embeddings = nn.ModuleDict({name: kind.embedding(width) for name, kind in self.conditions.items()})
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, channels * patch**2)

    @classmethod
    def sized_for(cls, width: int, sides: Sequence[int]) -> dict[str, Any]:
        """Return as many values of a patch as leave 16 x 16 patches, and more layers for a greater width."""
        patch = max(2, max(sides) // 16)
        return {"width": width, "layers": 2 + width // 32, "patch": patch}

    @classmethod
    def divisor_of(cls, arguments: Mapping[str, Any]) -> int:
        """Return the side of a patch."""
        return int(arguments.get("patch", 2))

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Return the velocity ``[b, c, h, w]``."""
        context = self.times(torch.stack((t, t if r is None else r), dim=1))
        for name, embedding in self.embeddings.items():
            values = conditions[name] if name in conditions else self.conditions[name].none(x.shape[0], x.device)
            context = context + embedding(values)
        sides = {"p": self.patch, "q": self.patch}
        tokens = self.into(rearrange(x, "b c (h p) (w q) -> b (h w) (c p q)", **sides)) + self.place + context[:, None]
        for block in self.blocks:
            tokens = block(tokens)
        height = x.shape[2] // self.patch
        return rearrange(self.out(tokens), "b (h w) (c p q) -> b c (h p) (w q)", h=height, **sides)
