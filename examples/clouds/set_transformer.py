"""A network for clouds of points: attention among the points, in any order and number."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geometry import Geometry
from rectified_flow import register
from rectified_flow.condition import ConditionSpecs
from rectified_flow.networks.unet import TimeEmbedding, zero_init

HEAD = 32


@register(role="network", needs=("conditions",))
class SetTransformer(nn.Module):
    """Attention among the points of a cloud; permuted points give the output permuted alike.

    A point of twice the weight counts as two points, and a point of weight 0 is absent.

    Args:
        geometry: geometry of the points.
        conditions: conditions by name.
        width: channels of a point, a multiple of 32.
        layers: number of attention layers.
    """

    def __init__(self, geometry: Geometry, conditions: ConditionSpecs, width: int, layers: int) -> None:
        super().__init__()
        self.geometry, self.conditions, self.width, self.layers = geometry, dict(conditions), width, layers
        features = geometry.coordinates(torch.zeros(1, geometry.dim)).shape[1]
        self.place = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width))
        self.time = TimeEmbedding(width, width)
        self.embeddings = nn.ModuleDict({name: kind.embedding(width) for name, kind in self.conditions.items()})
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = zero_init(nn.Linear(width, geometry.dim))

    def forward(self, x: Tensor, t: Tensor, weights: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            x: points ``[b, n, d]``.
            t: times ``[b]``.
            weights: weights of the points ``[b, n]``, of any sum; None for equal weights.
            conditions: values by name ``[b, ...]``; a condition that is left out is "none" in every row.

        Returns:
            Velocities ``[b, n, d]``.
        """
        if weights is not None:  # whatever an absent point is, not a number included, it is replaced
            x = torch.where(weights[..., None] > 0, x, 0.0)
        hidden, context = self.place(self.geometry.coordinates(x)), self.time(t, t)
        for name, embedding in self.embeddings.items():
            values = conditions[name] if name in conditions else self.conditions[name].none(len(x), x.device)
            context = context + embedding(values)
        # The logarithm of a weight, added to the scores, multiplies the point's share of the attention by the weight.
        bias = None if weights is None else weights.log()[:, None, None]
        for block in self.blocks:
            hidden = block(hidden, F.silu(context), bias)
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

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | None) -> Tensor:
        """Return new channels ``[b, n, width]``; ``bias`` ``[b, 1, 1, n]`` is added to the attention scores."""
        scale_1, shift_1, scale_2, shift_2 = self.modulation(context)[:, None].chunk(4, dim=2)
        q, k, v = self.qkv(self.norm(x) * (1 + scale_1) + shift_1).unflatten(2, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q))
        x = x + self.join(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x) * (1 + scale_2) + shift_2)
