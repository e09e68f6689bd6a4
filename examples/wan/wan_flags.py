"""The flags of ``train_wan.py``."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from rectified_flow.cli.config import ProgramConfig, check_folders
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Natural, NonNegative, Positive, PositiveNumber, Probability, default_is
from rectified_flow.runs.config import TrainingConfig


@dataclass(frozen=True)
class WanConfig(Flags):
    """The model, the clips and the objective."""

    model: str = ""
    """Folder or hub id of a Wan pipeline of diffusers, such as Wan-AI/Wan2.2-TI2V-5B-Diffusers."""
    dataset_path: Path | None = None
    """Folder of clips with captions."""
    frames: Positive = 81
    """Frames of a clip; 1 more than a multiple of 4."""
    height: Positive = 480
    """Height of a frame [px]."""
    width: Positive = 832
    """Width of a frame [px]."""
    fps: Annotated[float, Interval(ge=0.01, le=1e30)] = 16.0  # a GIF shows a frame for at most 655 s
    """Frames per second; of a faster video, some are left out."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Folder for encoded clips."""
    train: Literal["lora", "full"] = "lora"
    """Train a LoRA of the attention's weights, or all weights."""
    lora_rank: Positive = 32
    """Rank of the LoRA."""
    lora_alpha: Annotated[PositiveNumber | None, default_is("the rank")] = None
    """Alpha of the LoRA, which is multiplied by alpha over rank."""
    noise_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest noise level of training; 0.875 1 or 0 0.875 for an expert of a model with two."""
    time_shift: Annotated[PositiveNumber | None, default_is("of the model's scheduler")] = None
    """Shift of the training times; above 1 it moves them towards the noise."""
    first_frame: bool = False
    """Learn to continue a given first frame without noise; needs a model whose tokens have times of their own."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    caption_dropout: Probability = 0.1
    """Probability of training a clip without its caption."""
    preview_clips: Natural = 2
    """Clips to sample every --sample_every steps, with the first captions; 0 for none."""
    preview_steps: Positive = 30
    """Steps of the pipeline's own scheduler."""
    preview_guidance: NonNegative = 5.0
    """Guidance scale of previews."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise UsageError("--model is missing: pass the folder or hub id of a Wan pipeline of diffusers")
        if self.dataset_path is None:
            raise UsageError("--dataset_path is missing: pass a folder of clips with captions")
        low, high = self.noise_range
        if not 0 <= low < high <= 1:
            raise UsageError(f"--noise_range is {low:g} {high:g}; it must be two increasing numbers from 0 to 1")


@dataclass(frozen=True)
class WanFlags:
    """All flags of the program."""

    wan: WanConfig = field(default_factory=WanConfig)
    run: TrainingConfig = field(
        default_factory=partial(
            TrainingConfig,
            batch_size=1,
            train_num_steps=2000,
            learning_rate=1e-4,
            lr_warmup_steps=50,
            ema_decay=0.99,
            num_samples=0,
            sample_every=500,
            save_every=250,
            output_dir=Path("runs/wan"),
        )
    )
    program: ProgramConfig = field(default_factory=ProgramConfig)

    def __post_init__(self) -> None:
        if self.run.num_samples != 0:
            raise UsageError("--num_samples is for pictures: pass --preview_clips instead")
        check_folders(self.run, self.wan.dataset_path, self.wan.cache_dir)
