"""Random tiny autoencoders of each class, in a few thousand parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

_DOWN_UP: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
_WAN: dict[str, Any] = {
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
TINY: dict[str, Callable[[], Any]] = {
    "AutoencoderKL": lambda: diffusers.AutoencoderKL(**_DOWN_UP),
    "AutoencoderTiny": lambda: diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    "AutoencoderKLFlux2": lambda: diffusers.AutoencoderKLFlux2(**_DOWN_UP),
    "AutoencoderKLWan": lambda: diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, **_WAN),
}


def save_tiny(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write one with random weights; returns its folder."""
    torch.manual_seed(seed)
    TINY[kind]().save_pretrained(folder)
    return folder
