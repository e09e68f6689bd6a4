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
_WAN22: dict[str, Any] = {
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def _dc() -> Any:
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {
            f"{side}_block_types": ("ResBlock", "EfficientViTBlock"),
            f"{side}_block_out_channels": (8, 8),
            f"{side}_qkv_multiscales": ((), (5,)),
            f"{side}_layers_per_block": (1, 1),
        }
    return diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        **sides,
    )


TINY: dict[str, Callable[[], Any]] = {
    "AutoencoderKL": lambda: diffusers.AutoencoderKL(**_DOWN_UP),
    "AutoencoderTiny": lambda: diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    "AutoencoderKLFlux2": lambda: diffusers.AutoencoderKLFlux2(**_DOWN_UP),
    "AutoencoderDC": _dc,
    "AutoencoderKLQwenImage": lambda: diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
    "AutoencoderKLWan": lambda: diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, **_WAN),
    "Wan2.2": lambda: diffusers.AutoencoderKLWan(base_dim=4, decoder_base_dim=4, z_dim=48, **_WAN, **_WAN22),
}
FRAMES = ("AutoencoderKLQwenImage", "AutoencoderKLWan", "Wan2.2")
"""Those of videos."""


def save_tiny(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write one with random weights; returns its folder."""
    torch.manual_seed(seed)
    TINY[kind]().save_pretrained(folder)
    return folder
