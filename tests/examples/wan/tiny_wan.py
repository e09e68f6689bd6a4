"""Random tiny Wan pipelines, of the same classes as the real ones."""

from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tests.latents.tiny_autoencoders import TINY

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "square", "moves", "left", "right"]
Kind = Literal["text", "experts", "tokens", "image"]
BOUNDARY = 0.875
TRANSFORMER: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def _transformer(given: int, channels: int, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"in_channels": given, "out_channels": channels}
    return diffusers.WanTransformer3DModel(**TRANSFORMER, **sizes)


def _vae_of_tokens() -> Any:
    """Return an autoencoder like that of TI2V-5B: 48 channels, 16 times smaller sides."""
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.1] * 48,
        latents_std=[0.5] * 48,
    )


def save_pipeline(folder: Path, kind: Kind = "text") -> Path:
    """Save a pipeline.

    Args:
        folder: where to save it.
        kind: from ``text`` with one transformer, as Wan 2.1 has; from text with two ``experts``, as T2V-A14B;
            with a time for each of the ``tokens``, as TI2V-5B; from an ``image`` with two experts, as I2V-A14B.
    """
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )
    vae = _vae_of_tokens() if kind == "tokens" else TINY["AutoencoderKLWan"]()
    channels, has_experts = vae.config.z_dim, kind in ("experts", "image")
    given = 2 * channels + vae.config.scale_factor_temporal if kind == "image" else channels
    pipeline: Any = (diffusers.WanImageToVideoPipeline if kind == "image" else diffusers.WanPipeline)(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=_transformer(given, channels, 1),
        transformer_2=_transformer(given, channels, 2) if has_experts else None,
        boundary_ratio=BOUNDARY if has_experts else None,
        expand_timesteps=kind == "tokens",
    )
    pipeline.save_pretrained(folder)
    return folder
