"""Fine-tune a Wan video model of diffusers on a folder of clips with captions, as a LoRA.

Each video (mp4, webm, mov, mkv, gif) has a caption in a .txt file beside it. Clips and captions are encoded once, by
all GPUs together, into the cache. Needs `pip install -e ".[latent]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_wan:train", "train_wan:WanFlags", __doc__)

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from accelerate.utils import set_seed

from clips import encode_clips, find_clips
from rectified_flow import Callback, RectifiedFlow, Trainer, TrainingConfig
from rectified_flow.cli.build import join
from rectified_flow.cli.config import ProgramConfig, check_outside
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Positive, Probability, default_is, recorded
from rectified_flow.flows.times import LogitNormal
from rectified_flow.runs.folder import check_start
from rectified_flow.system.artifact import claim, write_output
from wan import Wan, WanNetwork

LORA_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class WanConfig(Flags):
    """The model and the clips."""

    model: str = ""
    """Folder or hub id of a Wan pipeline of diffusers, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers."""
    dataset_path: Path = Path("clips")
    """Folder of clips with captions."""
    frames: Positive = 81
    """Frames of a clip; 1 more than a multiple of 4."""
    height: Positive = 480
    """Height of a frame [px]."""
    width: Positive = 832
    """Width of a frame [px]."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Folder for encoded clips."""
    lora_rank: Positive = 32
    """Rank of the LoRA of the attention's weights."""
    caption_dropout: Probability = 0.1
    """Probability of training a clip without its caption."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise UsageError("--model is missing: pass the folder or hub id of a Wan pipeline of diffusers")


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
            save_every=250,
            output_dir=Path("runs/wan"),
        )
    )
    program: ProgramConfig = field(default_factory=ProgramConfig)

    def __post_init__(self) -> None:
        written = {"output_dir": self.run.output_dir, "cache_dir": self.wan.cache_dir}
        check_outside("dataset_path", self.wan.dataset_path, **written)


class LoraFile(Callback):
    """The averaged LoRA as a file for the pipeline's ``load_lora_weights``, written at each checkpoint."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write the file."""
        from diffusers import WanPipeline
        from peft import get_peft_model_state_dict

        if not trainer.accelerator.is_main_process:
            return
        network = trainer.averaged_flow.network
        assert isinstance(network, WanNetwork)
        with TemporaryDirectory(dir=trainer.config.output_dir) as stage:
            layers: Any = get_peft_model_state_dict(network.transformer)
            WanPipeline.save_lora_weights(stage, weight_name=LORA_FILE, transformer_lora_layers=layers)
            write_output(trainer.config.output_dir / LORA_FILE, (Path(stage) / LORA_FILE).read_bytes())


def train(flags: WanFlags) -> bool:
    """Train, and return whether the run finished."""
    state, config = join(flags), flags.wan
    set_seed(flags.run.seed)
    on_main(state, lambda: check_start(flags.run))
    on_main(state, lambda: claim(flags.run.output_dir, [LORA_FILE]))
    clips = find_clips(config.dataset_path)
    wan = Wan(config.model, (config.frames, config.height, config.width), state.device)
    dataset = encode_clips(wan, clips, config.cache_dir, state)
    wan.add_lora(config.lora_rank)
    wan.transformer.enable_gradient_checkpointing()
    flow = RectifiedFlow(
        WanNetwork(wan.transformer, dataset.empty, config.model),
        space=wan.space,
        time_distribution=LogitNormal(mean=0.0, std=1.0, shift=wan.time_shift),
        condition_dropout=config.caption_dropout,
    )
    del wan  # the encoders, which need as much memory as the transformer
    return Trainer(flow, dataset, flags.run, callbacks=[LoraFile()], flags=recorded(flags)).train()
