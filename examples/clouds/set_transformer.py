"""A network for clouds of points: attention among the points, in any order and number."""

import torch.nn.functional as F
from torch import Tensor, nn

from rectified_flow import register
from rectified_flow.condition import ConditionSpecs
from rectified_flow.networks.unet import TimeEmbedding, zero_init

HEAD = 32


@register
class SetTransformer(nn.Module):
    """Attention among the points of a cloud; permuted points give the output permuted alike.

    Args:
        conditions: conditions by name.
        width: channels of a point, a multiple of 32.
        layers: number of attention layers.
    """

    def __init__(self, conditions: ConditionSpecs, width: int, layers: int) -> None:
        super().__init__()
        self.conditions, self.width, self.layers = dict(conditions), width, layers
        self.place = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width))
        self.time = TimeEmbedding(width, width)
        self.embeddings = nn.ModuleDict({name: kind.embedding(width) for name, kind in self.conditions.items()})
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = zero_init(nn.Linear(width, 3))

    def forward(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        """Return velocities ``[b, n, 3]`` at points ``x`` and times ``t`` ``[b]``; a missing condition is "none"."""
        hidden, context = self.place(x * 3**0.5), self.time(t, t)
        for name, embedding in self.embeddings.items():
            values = conditions[name] if name in conditions else self.conditions[name].none(len(x), x.device)
            context = context + embedding(values)
        for block in self.blocks:
            hidden = block(hidden, F.silu(context))
        return self.out(self.norm(hidden))


class AttentionBlock(nn.Module):
    """Attention and a network for each point, both scaled and shifted by a context ``[b, width]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return new channels ``[b, n, width]``."""
        scale_1, shift_1, scale_2, shift_2 = self.modulation(context)[:, None].chunk(4, dim=2)
        q, k, v = self.qkv(self.norm(x) * (1 + scale_1) + shift_1).unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x) * (1 + scale_2) + shift_2)
