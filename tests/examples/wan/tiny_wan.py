"""Random tiny Wan pipelines, of the same classes as the real ones, and clips to train them on."""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tests.latents.tiny_autoencoders import TINY

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "square", "moves", "left", "right"]


def _transformer(channels: int) -> Any:
    torch.manual_seed(1)
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )


def save_pipeline(folder: Path) -> Path:
    """Save a pipeline of one transformer."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    )
    vae = TINY["AutoencoderKLWan"]()
    channels = vae.config.z_dim
    pipeline: Any = diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=_transformer(channels),
    )
    pipeline.save_pretrained(folder)
    return folder


def save_clips(folder: Path, count: int = 5, frames: int = 9, side: int = 32) -> Path:
    """Save videos in which a square moves, each with its caption."""
    for number in range(count):
        images = []
        for frame in range(frames):
            pixels = np.zeros((side, side, 3), np.uint8)
            pixels[8:16, frame : frame + 8, number % 3] = 200 + number
            images.append(Image.fromarray(pixels))
        images[0].save(folder / f"{number}.gif", save_all=True, append_images=images[1:], duration=50)
        (folder / f"{number}.txt").write_text(f"a {'red' if number % 2 else 'blue'} square moves right")
    return folder
