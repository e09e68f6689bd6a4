"""Kernels that a compiled training step launches on a GPU, and the bytes that they move. Needs no GPU.

The loss and its gradient are compiled for a pretended H100 (tests/pretended_card.py). Nothing runs, and nothing here is
a time: fewer launches and bytes make a step faster only where these bound it.

Counted are the launches of the compiler's own Triton kernels and the calls of libraries in the code that it wrote, and
for both the sizes of all tensors that they read and write. Kernels that the compiler combines into one count once. A
call counts once, though a library may launch several kernels for it and move more bytes. Draws before the loss, the
optimizer and the weight average are not part of the figures.

The defaults take some 20 minutes of one core, `--tiny --flows "rectified flow"` half a minute.
"""

import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args
from unittest.mock import patch

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks import forward_mode
from rectified_flow.networks.unet import Unet
from tests.pretended_card import Graph, move, pretended_card

Name = Literal["rectified flow", "improved mean flow"]


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    flows: tuple[Name, ...] = get_args(Name)
    """The flows to count."""
    image_size: int = 64
    """Side of the images [px]."""
    batch_size: int = 64
    """Images per step."""
    dim: int = 64
    """Channels of the Unet at full resolution."""
    dim_mults: tuple[int, ...] = (1, 2, 3, 4)
    """Channels of each level as multiples of --dim."""
    blocks_per_level: int = 2
    """Residual blocks in each level on the way down."""
    plain: bool = False
    """Compile without this project's options and form of a norm for a GPU, for comparison. For rectified flow only: the
    pretended card cannot take the gradient that the other form of a norm takes inside a forward-mode derivative."""
    tiny: bool = False
    """Count a network of one level at 32 px, without attention."""


@dataclass(frozen=True)
class Row:
    """The figures of one step."""

    name: str
    kernels: int
    calls: int
    gigabytes: float

    def __str__(self) -> str:
        launches = self.kernels + self.calls
        return f"| {self.name} | {launches:,} | {self.kernels:,} | {self.calls:,} | {self.gigabytes:.2f} |"


def count(name: Name, flags: Flags) -> Row:
    """Return the figures of a step in bf16, forward and backward."""
    graphs = compile_step(name, flags)
    kernels, calls = sum(graph.launches for graph in graphs), sum(graph.calls for graph in graphs)
    return Row(name, kernels, calls, sum(graph.bytes_moved for graph in graphs) / 1e9)


def compile_step(name: Name, flags: Flags) -> Sequence[Graph]:
    """Return the forward and the backward pass of a loss, as compiled."""
    if flags.tiny:
        flags = replace(flags, image_size=32, dim_mults=(1,), blocks_per_level=1)
    side, batch = flags.image_size, flags.batch_size
    network = Unet(flags.dim, flags.dim_mults, image_size=side, blocks_per_level=flags.blocks_per_level, dropout=0.1)
    network.to(memory_format=torch.channels_last)
    with ExitStack() as stack:
        graphs = stack.enter_context(pretended_card())
        stack.enter_context(torch.device("cuda"))
        if flags.plain:
            stack.enter_context(patch.object(forward_mode, "is_compiled_for_gpu", lambda _x: False))
        flow: Flow = RectifiedFlow(network) if name == "rectified flow" else MeanFlow(network)
        move(flow).train()
        if flags.plain:
            flow.loss = torch.compile(flow.loss)
        else:
            flow.compile()
        keys = torch.zeros(batch, dtype=torch.int32)
        stack.enter_context(patch.object(randomness._draws, "dropout_keys", keys))
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        x, noise, t = torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side), torch.rand(batch)
        if isinstance(flow, MeanFlow):
            flow.loss(x, noise, t, t / 2, {}, round(flow.mean_fraction * batch))
        else:
            flow.loss(x, noise, t, {})
    return graphs


def main(flags: Flags) -> None:
    """Measure, and print the table."""
    if flags.plain and flags.flows != ("rectified flow",):
        raise SystemExit('--plain needs --flows "rectified flow"')
    print(f"torch {torch.__version__}, bf16, batch {flags.batch_size}")
    print("\n| step | launches | Triton kernels | library calls | GB |\n|---|---|---|---|---|")
    for name in flags.flows:
        print(count(name, flags), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
