"""A UNet of the ADM / DDPM++ kind for velocities and average velocities.

Every operation has a forward-mode derivative (`torch.func.jvp`), alone, under bf16 autocast and inside a compiled loss:
attention is written as matmul and softmax because the fused kernels have none.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from annotated_types import Interval, Len
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.condition import ConditionSpecs, Picture
from rectified_flow.networks.forward_mode import Conv2d, GroupNorm, attend, keep_no_more, modulated
from rectified_flow.networks.network import Network
from rectified_flow.registry import register

# With these limits, a damaged description cannot ask for more than the memory holds.
Side = Annotated[int, Interval(gt=0, le=2**20)]
Count = Annotated[int, Interval(gt=0, le=1000)]
Width = Annotated[int, Interval(gt=0, le=4096)]
Multiples = Annotated[Sequence[Annotated[int, Interval(gt=0, le=64)]], Len(1, 20)]
BLOCK_NAME = re.compile(r"(down|up)\.([0-9]{1,6})\.(.+)")
"""Names of the weights of a block on the way down or up, with its number."""
M = TypeVar("M", bound=nn.Module)
MAX_LEVELS, MIN_SIDE = 5, 8
"""Largest number of levels of a sized network, and least side of its lowest level [px]."""
MAX_ATTENTION_SIDE = 32
"""Largest side of a level with attention in a sized network [px]."""


@register(role="network", needs=("channels", "image_size", "conditions", "dim", "dim_mults", "dropout"))
class Unet(Network):
    """Predict a tensor of the shape of ``x`` from ``x``, the time and conditions.

    Residual blocks with scale-and-shift conditioning and resampling inside blocks follow ADM (Dhariwal & Nichol 2021,
    arXiv:2105.05233, section 3). With the defaults at 64 px: 25 M parameters.

    Args:
        dim: channels at full resolution.
        dim_mults: channels of each level as multiples of ``dim``; each level halves the side of the one before.
        channels: channels of the images.
        conditions: the conditions it takes, by name; their embeddings are added to that of the time, and those of
            pictures to the first layer. Attention also reads those that are sequences.
        image_size: side in pixels of the images to come; it decides which levels get attention.
        attention_sides: sides in pixels of the levels with attention.
        attention_head_dim: channels of one attention head.
        blocks_per_level: residual blocks in each level on the way down; one more on the way up.
        dropout: probability inside residual blocks.

    Raises:
        ValueError: if ``image_size`` does not divide, or a condition has the name of another input.
    """

    widths: ClassVar[Mapping[int, int]] = {16: 0, 24: 4_000, 32: 16_000, 48: 60_000, 64: 250_000}  # budget.md
    is_convolutional = True

    def __init__(
        self,
        dim: Width = 64,
        dim_mults: Multiples = (1, 2, 3, 4),
        channels: Side = 3,
        conditions: ConditionSpecs | None = None,
        *,
        image_size: Side = 64,
        attention_sides: Sequence[int] = (16, 8),
        attention_head_dim: Count = 64,
        blocks_per_level: Count = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.dim_mults, self.channels = dim, tuple(dim_mults), channels
        self.conditions: ConditionSpecs = dict(conditions or {})
        self.image_size, self.attention_sides = image_size, tuple(attention_sides)
        self.attention_head_dim, self.blocks_per_level, self.dropout = attention_head_dim, blocks_per_level, dropout
        self.gradient_checkpointing = False  # not described: it changes no result
        self.downsampling = 2 ** (len(dim_mults) - 1)
        self.check_shape((channels, image_size, image_size))

        condition_dim = 4 * dim
        self.time_embedding = TimeEmbedding(dim, condition_dim)
        self._embeddings = dict[str, str]()
        """Names of the modules that embed the conditions; checkpoints contain them."""
        for name, kind in self.conditions.items():
            words = f"{name.removesuffix('s')}_embedding", f"{name}_embedding", f"{name}_value_embedding"
            free = [each for each in words if not hasattr(self, each)]  # label_embedding for labels, if that is free
            if name in ("x", "t", "r") or not free:
                raise ValueError(f"the condition {name!r} has the name of another input of this Unet: rename it")
            self._embeddings[name] = free[0]
            self.add_module(free[0], kind.embedding(dim if isinstance(kind, Picture) else condition_dim))
            if (sequence := kind.sequence_embedding(condition_dim)) is not None:
                self.add_module(f"{name}_sequence", sequence)
        sequences = condition_dim if any(hasattr(self, f"{name}_sequence") for name in self.conditions) else 0

        layers = count(1)

        def block(dim_in: int, dim_out: int, side: int, resample: nn.Module | None = None) -> Block:
            heads = 0
            if side in attention_sides and resample is None:  # as many heads of at least that many channels as divide
                most = max(1, dim_out // attention_head_dim)
                heads = next(heads for heads in range(most, 0, -1) if dim_out % heads == 0)
            return Block(dim_in, dim_out, condition_dim, heads, dropout, next(layers), resample, sequences)

        levels = [(level, dim * mult, image_size // 2**level) for level, mult in enumerate(dim_mults)]
        self.conv_in = Conv2d(channels, dim, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, skips = dim, [dim]
        for level, level_width, side in levels:
            if level > 0:
                self.down.append(block(width, width, side, nn.AvgPool2d(2)))
                skips.append(width)
            for _ in range(blocks_per_level):
                self.down.append(block(width, level_width, side))
                width = level_width
                skips.append(width)

        self.middle = nn.ModuleList([block(width, width, levels[-1][-1]), block(width, width, side=0)])

        for level, level_width, side in reversed(levels):
            for _ in range(blocks_per_level + 1):
                self.up.append(block(width + skips.pop(), level_width, side))
                width = level_width
            if level > 0:
                self.up.append(block(width, width, side, nn.Upsample(scale_factor=2.0)))

        if sequences and not any(isinstance(module, Attention) for module in self.modules()):
            sides = [side for _level, _width, side in levels]
            raise ValueError(f"tokens of captions need a level with attention: add one of {sides} to attention_sides")

        self.norm_out = GroupNorm(width)
        self.conv_out = zero_init(Conv2d(width, channels, 3, padding=1))

    @classmethod
    @override
    def sized_for(cls, width: int, sides: Sequence[int]) -> dict[str, object]:
        levels = 1
        while levels < MAX_LEVELS and min(sides) // 2**levels >= MIN_SIDE and math.gcd(*sides) % 2**levels == 0:
            levels += 1
        lowest = min(sides) // 2 ** (levels - 1)
        # The memory of attention grows with the fourth power of the side.
        attention = [lowest] if max(sides) // 2 ** (levels - 1) <= MAX_ATTENTION_SIDE else []
        mults = (*[1] * (levels - 3), *(1, 2, 3)[:levels])
        parts = {"blocks_per_level": 1, "attention_sides": attention, "dropout": 0.0}
        return {"dim": width, "dim_mults": mults, **parts}

    @classmethod
    @override
    def divisor_of(cls, arguments: Mapping[str, object]) -> int:
        mults = arguments.get("dim_mults", (1, 2, 3, 4))
        assert isinstance(mults, Sequence)
        return 2 ** (len(mults) - 1)

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Evaluate the network.

        Args:
            x: images ``[b, c, h, w]``.
            t: times ``[b]`` in [0, 1].
            r: earlier times ``[b]`` for the average velocity over ``[r, t]``; None means ``r = t``.
            conditions: values by name ``[b, ...]``; a condition left out is "none" for every row.

        Returns:
            A tensor of the shape of ``x``.

        Raises:
            ValueError: if the network does not take the shape of ``x``, or a condition.
        """
        self.check_shape(x.shape[1:])
        embedding, pictures, sequences = self.time_embedding(t, t if r is None else r), [], []
        for name, kind in self.conditions.items():
            values = conditions.pop(name) if name in conditions else kind.none(len(x), x.device)
            embedded = getattr(self, self._embeddings[name])(values)
            if isinstance(kind, Picture):
                pictures.append(embedded)
            else:
                embedding = embedding + embedded
            if (sequence := getattr(self, f"{name}_sequence", None)) is not None:
                sequences.append(sequence(values))
        if conditions:
            raise ValueError(f"this Unet does not take {', '.join(conditions)}, only {list(self.conditions)}")
        condition = F.silu(embedding)
        context = tuple(torch.cat(parts, dim=1) for parts in zip(*sequences, strict=True))

        x = sum(pictures, self.conv_in(x))
        skips = [x]
        for block in self.down:
            x = self._evaluate(block, x, condition, *context)
            skips.append(x)
        for block in self.middle:
            x = self._evaluate(block, x, condition, *context)
        for block in self.up:
            if block.resample is None:
                x = torch.cat((x, skips.pop()), dim=1)
            x = self._evaluate(block, x, condition, *context)
        return self.conv_out(F.silu(self.norm_out(x)))

    def _evaluate(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            keep_no_more()
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def align(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename the weights of a Unet with another number of levels, so that they fit this one's levels.

        If this network has more levels, its lowest ones get the weights: on larger pictures, these have the same
        resolutions. If it has fewer, it gets the weights of the highest levels.
        """
        own = {"down": len(self.down), "up": len(self.up)}
        blocks = {name: match for name in weights if (match := BLOCK_NAME.fullmatch(name))}
        there = {part: len({match[2] for match in blocks.values() if match[1] == part}) for part in own}
        shift = {"down": max(0, own["down"] - there["down"]), "up": min(0, own["up"] - there["up"])}
        per_level = {"down": self.blocks_per_level + 1, "up": self.blocks_per_level + 2}
        if len({(own[part] - there[part]) / per_level[part] for part in own}) > 1:  # or numbers of blocks
            return dict(weights)
        names = {name: f"{match[1]}.{int(match[2]) + shift[match[1]]}.{match[3]}" for name, match in blocks.items()}
        return {names.get(name, name): value for name, value in weights.items()}

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check that this Unet takes data of ``shape`` ``(c, h, w)``.

        Raises:
            ValueError: if it does not.
        """
        if len(shape) != 3 or shape[0] != self.channels:
            raise ValueError(f"this Unet takes data of shape ({self.channels}, h, w), not {tuple(shape)}")
        for side in shape[1:]:
            if side % self.downsampling:
                raise ValueError(f"image side {side} is not divisible by {self.downsampling}, as the levels require")


class TimeEmbedding(nn.Module):
    """Embed times ``t`` and intervals ``t - r``, both ``[b]``, into ``[b, dim_out]``, in float32.

    Times stay unscaled in [0, 1]: scaling them, as diffusion networks do, multiplies the time derivative that mean flow
    learns from. The interval's features vanish at ``r = t`` and its weights start at zero, so a network trained
    without ``r`` is a valid start for one trained with it.
    """

    def __init__(self, dim: int, dim_out: int, max_frequency: float = 16.0) -> None:
        super().__init__()
        frequencies = torch.logspace(0, math.log10(max_frequency), dim // 2)
        # A buffer would be sent to every process at every step.
        self.frequencies = nn.Parameter(frequencies, requires_grad=False)
        self.time = nn.Linear(dim // 2 * 2, dim_out)
        self.interval = zero_init(nn.Linear(dim // 2 * 2, dim_out, bias=False))
        self.out = nn.Linear(dim_out, dim_out)

    def forward(self, t: Tensor, r: Tensor) -> Tensor:
        """Embed times and intervals as ``[b, dim_out]``."""
        with torch.autocast(t.device.type, enabled=False):
            angles = t[:, None] * self.frequencies
            gaps = (t - r)[:, None] * self.frequencies
            hidden = self.time(torch.cat((angles.cos(), angles.sin()), dim=1))
            hidden = hidden + self.interval(torch.cat((1 - gaps.cos(), gaps.sin()), dim=1))
            return self.out(F.silu(hidden))


class Block(nn.Module):
    """A residual block, followed by attention if ``heads`` is not zero; ``resample`` changes the resolution.

    Attention also reads sequences of conditions, of width ``sequences``, if that is not zero.
    """

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        condition_dim: int,
        heads: int,
        dropout: float,
        layer: int,
        resample: nn.Module | None,
        sequences: int = 0,
    ) -> None:
        super().__init__()
        self.resample = resample
        self.dropout = dropout
        self.layer = layer
        self.norm1 = GroupNorm(dim_in)
        self.conv1 = Conv2d(dim_in, dim_out, 3, padding=1)
        self.modulation = nn.Linear(condition_dim, 2 * dim_out)
        self.norm2 = GroupNorm(dim_out)
        self.conv2 = zero_init(Conv2d(dim_out, dim_out, 3, padding=1))
        self.skip = Conv2d(dim_in, dim_out, 1) if dim_in != dim_out else nn.Identity()
        self.attention = Attention(dim_out, heads, sequences) if heads else None

    def forward(self, x: Tensor, condition: Tensor, *context: Tensor) -> Tensor:
        """Transform ``x`` ``[b, c, h, w]`` under a condition ``[b, condition_dim]``; see :class:`Attention`."""
        h = F.silu(self.norm1(x))
        if self.resample is not None:
            x, h = self.resample(x), self.resample(h)
        h = self.conv1(h)
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(modulated(self.norm2(h), scale, shift))
        if self.training and self.dropout > 0:
            h = randomness.dropout(h, self.dropout, self.layer)
        x = self.skip(x) + self.conv2(h)
        return x if self.attention is None else self.attention(x, *context)


class Attention(nn.Module):
    """Self-attention over pixels with a residual connection (Vaswani et al. 2017, arXiv:1706.03762).

    Pixels also attend to the sequences of conditions, whose keys and values are appended to those of the pixels (Nichol
    et al. 2021, arXiv:2112.10741, section 2.1).

    Args:
        dim: channels.
        heads: heads, which divide the channels.
        sequences: width of the sequences; 0 without any.
    """

    def __init__(self, dim: int, heads: int, sequences: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.norm = GroupNorm(dim)
        self.qkv = Conv2d(dim, 3 * dim, 1)
        self.out = zero_init(Conv2d(dim, dim, 1))
        if sequences:
            self.sequence = nn.Linear(sequences, 2 * dim)

    def forward(self, x: Tensor, sequence: Tensor | None = None, known: Tensor | None = None) -> Tensor:
        """Add attention among all pixels, and to a sequence, to ``x``.

        Args:
            x: ``[b, c, h, w]``.
            sequence: ``[b, m, sequences]``.
            known: bool ``[b, m]``, false for padding.
        """
        qkv = self.qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (rearrange(each, "b (n d) h w -> b n (h w) d", n=self.heads) for each in qkv)
        mask = None
        if sequence is not None and known is not None:
            further = self.sequence(sequence).to(k.dtype).chunk(2, dim=2)
            more = [rearrange(each, "b m (n d) -> b n m d", n=self.heads) for each in further]
            k, v = torch.cat((k, more[0]), dim=2), torch.cat((v, more[1]), dim=2)
            mask = torch.cat((known.new_ones(x.shape[0], q.shape[2]), known), dim=1)[:, None, None]
        attended = rearrange(attend(q, k, v, mask), "b n (h w) d -> b (n d) h w", h=x.shape[-2])
        return x + self.out(attended)


def zero_init(module: M) -> M:
    """Set every parameter of ``module`` to zero, so that what it adds starts as nothing."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module
