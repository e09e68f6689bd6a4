"""The members of a network, beside its call, with which programs size it, check it and move it to a device.

Any ``nn.Module`` with the call ``network(x, t, **conditions)`` is a network. A class that derives from
:class:`Network` is also planned for a budget.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

import torch
from torch import nn

from rectified_flow.errors import UsageError

M = TypeVar("M", bound=nn.Module)


class Network(nn.Module):
    """A network with declared sizes."""

    widths: ClassVar[Mapping[int, int]] = {}
    """Widths to choose from, each with the number of training images from which it is better than the one before; empty
    if a plan does not choose the size of the network."""
    is_convolutional: ClassVar[bool] = False
    """Whether the network is faster with its weights and activations in channels-last order, where matrix units are."""

    gradient_checkpointing: bool | None = None
    """Whether the backward pass computes activations again instead of keeping them; None if this is not supported."""

    @classmethod
    def sized_for(cls, width: int, sides: Sequence[int]) -> dict[str, object]:
        """Return the arguments of the constructor for a width and for ``x`` ``[b, c, *sides]``."""
        raise NotImplementedError

    @classmethod
    def divisor_of(cls, arguments: Mapping[str, object]) -> int:
        """Return the number that must divide the sides of ``x``, for arguments of the constructor."""
        return 1


def checkpoint_gradients(network: nn.Module) -> None:
    """Have the backward pass of a network compute activations again instead of keeping them.

    Raises:
        UsageError: if the network cannot.
    """
    if not isinstance(network, Network) or network.gradient_checkpointing is None:
        name = type(network).__name__
        raise UsageError(f"`gradient_checkpointing` has no effect: {name} keeps its activations; leave it out")
    network.gradient_checkpointing = True


def to_device(module: M, device: torch.device, precision: str) -> M:
    """Move ``module`` to ``device``, and set the memory format of the convolutional networks in it.

    The format is channels-last on a GPU, whose matrix units read images in this order, and on a CPU in float32. On a
    CPU in bf16 it is contiguous: the operations between convolutions would lose more than the convolutions gain
    (docs/measurements/speed.md).

    Args:
        module: a flow, or any other module.
        device: the target device.
        precision: ``no``, ``bf16`` or ``fp16``, as in Accelerate.
    """
    last = device.type == "cuda" or (device.type == "cpu" and precision == "no")
    for each in module.modules():
        if isinstance(each, Network) and each.is_convolutional:
            each.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    return module.to(device)
