"""Make a tiny Wan pipeline and four clips of moving discs, on which train_wan.py runs within minutes on a CPU.

The autoencoder is trained here on further discs. The transformer is random, for train_wan.py to train, and the text
encoder is random and stays so. Needs `pip install -e ".[latent]"`. The README has the run that follows:

    python examples/wan/make_tiny_model.py --output_dir tiny-wan
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("make_tiny_model:make", "make_tiny_model:TinyFlags", __doc__)

from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Positive, Seed
from rectified_flow.system.files import prepare_folder, writing
from rectified_flow.system.terminal import progress_bar

FRAMES, SIDE, RADIUS, CHANNELS = 9, 64, 16, 16
LATENT_NOISE = 0.05
"""Standard deviation of the distribution of latents, and of the noise that the decoder learns to ignore."""
COLOURS = {"red": (0.9, 0.2, 0.2), "green": (0.2, 0.8, 0.3), "blue": (0.2, 0.4, 0.9), "yellow": (0.95, 0.85, 0.2)}
WAYS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "down": (0.0, 1.0), "up": (0.0, -1.0)}
CLIPS = [("red", "right"), ("green", "left"), ("blue", "down"), ("yellow", "up")]
WORDS = ["<pad>", "</s>", "<unk>", "a", "disc", "moves", *COLOURS, *WAYS]


@dataclass(frozen=True)
class TinyConfig(Flags):
    """The files to write."""

    output_dir: Path = Path("tiny-wan")
    """New or empty folder for the pipeline, in model, and for the clips, in clips."""
    steps: Positive = 1500
    """Training steps of the autoencoder."""
    seed: Seed = 0
    """Seed of the weights and of the discs."""


@dataclass(frozen=True)
class TinyFlags:
    """All flags of the program."""

    tiny: TinyConfig = field(default_factory=TinyConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


def make(flags: TinyFlags) -> None:
    """Write the clips and the pipeline."""
    config = flags.tiny
    folder = prepare_folder("output_dir", config.output_dir)
    if any(folder.iterdir()):
        raise UsageError(f"--output_dir {folder} is not empty: delete it, or choose another folder")
    torch.manual_seed(config.seed)
    with writing(folder):
        for colour, way in CLIPS:
            write_clip(folder / "clips" / f"{colour}-{way}", draw_disc(colour, way), f"a {colour} disc moves {way}")
        save_pipeline(train_autoencoder(config.steps), folder / "model")
    print(f"pipeline in {folder / 'model'}, {len(CLIPS)} clips in {folder / 'clips'}")


def draw_disc(colour: str, way: str, offset: Tensor | float = 0.0) -> Tensor:
    """Return frames ``[3, f, h, w]`` in [-1, 1] of a disc that passes ``offset`` [px] off the centre."""
    along = torch.linspace(-SIDE / 5, SIDE / 5, FRAMES)[:, None]
    centres = SIDE / 2 + along * torch.tensor(WAYS[way]) + offset
    pixels = torch.arange(SIDE) + 0.5
    distance = torch.hypot(pixels - centres[:, 0, None, None], pixels[:, None] - centres[:, 1, None, None])
    cover = (RADIUS + 0.5 - distance).clamp(0, 1)
    return 2 * torch.lerp(torch.tensor(0.15), torch.tensor(COLOURS[colour])[:, None, None, None], cover) - 1


def draw_random_disc() -> Tensor:
    """Return the frames of a disc of random colour and direction, at most 4 px off the centre."""
    colour, way = (list(each)[int(torch.randint(len(each), ()))] for each in (COLOURS, WAYS))
    return draw_disc(colour, way, 8 * torch.rand(2) - 4)


def write_clip(folder: Path, frames: Tensor, caption: str) -> None:
    """Write frames ``[3, f, h, w]`` in [-1, 1] as a folder of pictures, with the caption."""
    folder.mkdir(parents=True)
    for number, frame in enumerate(frames.permute(1, 2, 3, 0)):
        Image.fromarray(((frame + 1) * 127.5).round().byte().numpy()).save(folder / f"{number}.png")
    (folder / "caption.txt").write_text(caption)


def train_autoencoder(steps: int, batch_size: int = 2) -> Any:
    """Return an autoencoder of 16 times smaller sides, whose latents are scaled by their measured statistics."""
    from diffusers import AutoencoderKLWan

    sizes: dict[str, Any] = {"base_dim": 16, "decoder_base_dim": 16, "dim_mult": [1, 1, 1], "num_res_blocks": 1}
    patches: dict[str, Any] = {"patch_size": 4, "in_channels": 48, "out_channels": 48, "scale_factor_spatial": 16}
    how: dict[str, Any] = {"temperal_downsample": [True, True], "is_residual": True}  # shortcuts make training fast
    vae: Any = AutoencoderKLWan(z_dim=CHANNELS, **sizes, **patches, **how)
    optimizer = torch.optim.Adam(vae.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps, pct_start=0.1)
    with progress_bar(total=steps, desc="training the autoencoder", unit="step") as bar:
        for _ in range(steps):
            clips = torch.stack([draw_random_disc() for _ in range(batch_size)])
            latents = vae.encode(clips).latent_dist.mean
            decoded = vae.decode(latents + LATENT_NOISE * torch.randn_like(latents)).sample
            error = (decoded - clips).square().mean()
            optimizer.zero_grad()
            error.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.update()
            bar.set_postfix_str(f"error {error.item():.4f}")
    with torch.no_grad():
        vae.quant_conv.weight[CHANNELS:] = 0  # the second half of its outputs is the logarithm of the variance
        vae.quant_conv.bias[CHANNELS:] = 2 * log(LATENT_NOISE)
        latents = vae.encode(torch.stack([draw_random_disc() for _ in range(32)])).latent_dist.mean
    std, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return vae


def save_pipeline(vae: Any, folder: Path) -> None:
    """Save a pipeline of an autoencoder, and of a random transformer and text encoder."""
    import diffusers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    text = UMT5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    sizes: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 256, "num_layers": 3}
    ends: dict[str, Any] = {"in_channels": CHANNELS, "out_channels": CHANNELS, "text_dim": 32, "freq_dim": 64}
    pipeline: Any = diffusers.WanPipeline(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=512, **special),
        text_encoder=UMT5EncoderModel(text),
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=diffusers.WanTransformer3DModel(**sizes, **ends),
    )
    pipeline.save_pretrained(folder)
