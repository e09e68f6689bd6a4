"""The flags of ``train_wan.py``."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from rectified_flow.cli.program_flags import ProgramConfig, check_outside
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Natural, NonNegative, Positive, PositiveNumber, Probability, default_is
from rectified_flow.runs.training_config import TrainingConfig

Expert = Literal["high", "low"]


@dataclass(frozen=True)
class WanConfig(Flags):
    """The model, the clips and the objective."""

    model: str = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    """Folder or hub id of a Wan pipeline of diffusers."""
    expert: Annotated[Expert | None, default_is("the only one")] = None
    """Expert to train of a model that has two, such as Wan2.2-T2V-A14B: that of high or of low noise levels."""
    first_frame: bool = False
    """Train to continue a given first frame with TI2V-5B; image-to-video models always do."""
    dataset_path: Path = Path("clips")
    """Folder of clips with captions."""
    frames: Positive = 81
    """Frames of a clip; 1 more than a multiple of 4."""
    height: Positive = 480
    """Height of a frame [px]."""
    width: Positive = 832
    """Width of a frame [px]."""
    fps: Annotated[float, Interval(ge=0.01, le=1000)] = 24.0
    """Frames per second; of a faster video, frames are left out."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Folder for encoded clips."""
    lora_rank: Natural = 32
    """Rank of the LoRA of the attention's weights; 0 trains all weights of the transformer."""
    lora_alpha: Annotated[PositiveNumber | None, default_is("the rank")] = None
    """Alpha of the LoRA, whose output is multiplied by alpha / rank."""
    time_shift: Annotated[PositiveNumber | None, default_is("that of the model's scheduler")] = None
    """Shift of the training times; a shift above 1 moves them towards the noise."""
    caption_dropout: Probability = 0.1
    """Probability of training a clip without its caption."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    guidance_scale: NonNegative = 5.0
    """Guidance scale of the sampled clips."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank == 0 and self.lora_alpha is not None:
            raise UsageError("--lora_alpha has no effect with --lora_rank 0, which trains all weights: leave it out")


@dataclass(frozen=True)
class WanFlags:
    """All flags of the program. ``num_samples`` clips are sampled in ``sample_steps`` steps of the pipeline."""

    wan: WanConfig = field(default_factory=WanConfig)
    run: TrainingConfig = field(
        default_factory=partial(
            TrainingConfig,
            batch_size=1,
            train_num_steps=2000,
            learning_rate=1e-4,
            lr_warmup_steps=50,
            ema_decay=0.99,
            num_samples=2,
            sample_steps=30,
            sample_every=500,
            save_every=250,
            output_dir=Path("runs/wan"),
        )
    )
    program: ProgramConfig = field(default_factory=ProgramConfig)

    def __post_init__(self) -> None:
        written = {"output_dir": self.run.output_dir, "checkpoint_dir": self.run.checkpoint_dir}
        check_outside("dataset_path", self.wan.dataset_path, cache_dir=self.wan.cache_dir, **written)
