"""Files that a run writes while it trains: the LoRA for the pipeline, and clips of the first captions."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError
from torch import Tensor, nn

from clips import Clip
from encoded_clips import ClipDataset
from rectified_flow import Callback, Measurement, Trainer
from rectified_flow.errors import UsageError
from rectified_flow.system.outputs import claim, write_output
from rectified_flow.system.pictures import write_motion, write_picture
from rectified_flow.system.signals import raise_if_stop_requested
from rectified_flow.system.terminal import line
from wan_flow import WanNetwork
from wan_pipeline import Wan

STRIP_FRAMES = 8
LORA_FOLDER, LORA_FILE = "lora", "pytorch_lora_weights.safetensors"
"""Folder of the LoRA in that of the run, and its file, as the pipeline expects it."""


def transformer_of(trainer: Trainer) -> nn.Module:
    """Return the transformer with averaged weights."""
    network = trainer.averaged_flow.network
    assert isinstance(network, WanNetwork)
    transformer: nn.Module = network.transformer
    return transformer


class LoraFile(Callback):
    """The averaged LoRA as a file for the pipeline's ``load_lora_weights``, written at each checkpoint.

    The file has the LoRA's settings: without them, an alpha other than the rank would be lost in loading.
    """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write the file; a full disk is reported and does not end the run."""
        if trainer.accelerator.is_main_process:
            try:
                write_lora(transformer_of(trainer), trainer.config.output_dir / LORA_FOLDER)
            except (OSError, UsageError, SafetensorError) as error:
                trainer.run.print(f"warning: the LoRA of step {trainer.state.step} could not be written ({error})")


def claim_lora(output_dir: Path) -> None:
    """Claim the names of the LoRA in the folder of a run, before its first step. Call in one process only.

    Raises:
        UsageError: if there is such a folder or file of the user's.
    """
    claim(output_dir, [LORA_FOLDER])
    folder = output_dir / LORA_FOLDER
    folder.mkdir(exist_ok=True)
    claim(folder, [LORA_FILE])


def write_lora(transformer: nn.Module, folder: Path) -> None:
    """Write the LoRA of a transformer for ``load_lora_weights``; with ``load_into_transformer_2=True`` for the second.

    Raises:
        OSError: if that fails.
    """
    from diffusers import WanPipeline
    from peft import get_peft_model_state_dict

    config: Any = transformer.peft_config
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as stage:
        WanPipeline.save_lora_weights(
            stage,
            weight_name=LORA_FILE,
            transformer_lora_layers=get_peft_model_state_dict(transformer),
            transformer_lora_adapter_metadata=config["default"].to_dict(),
        )
        write_output(folder / LORA_FILE, (Path(stage) / LORA_FILE).read_bytes())


class Previews(Measurement):
    """Clips of the first captions, sampled by the pipeline with its own scheduler; each rank samples a share.

    Args:
        wan: the model.
        clips: the training clips.
        dataset: their encodings.
        every: steps between previews.
    """

    def __init__(self, wan: Wan, clips: Sequence[Clip], dataset: ClipDataset, every: int) -> None:
        super().__init__("previews", min(wan.config.preview_clips, len(clips)), every)
        self.wan, self.clips, self.dataset = wan, clips, dataset

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        """Return frames, uint8 ``[b, f, 3, h, w]``."""
        config, empty = self.wan.config, self.dataset.empty[None].to(trainer.device)
        pipeline = self.wan.pipeline(transformer_of(trainer))
        pipeline.set_progress_bar_config(disable=True)
        clips = [torch.empty(0, config.frames, 3, config.height, config.width, dtype=torch.uint8)]
        for number in numbers:
            text = self.dataset.read_batch([number])["text"].to(trainer.device).float()
            given: dict[str, Any] = {}
            if config.first_frame:
                given["image"] = self.clips[number].decode(1, config.height, config.width, config.fps).float() / 255
            with torch.autocast(trainer.device.type, enabled=False):  # as users call the pipeline
                frames = pipeline(
                    prompt_embeds=text,
                    negative_prompt_embeds=empty,
                    guidance_scale=config.preview_guidance,
                    height=config.height,
                    width=config.width,
                    num_frames=config.frames,
                    num_inference_steps=config.preview_steps,
                    generator=torch.Generator("cpu").manual_seed(number),
                    output_type="pt",
                    callback_on_step_end=_stop_if_requested,
                    **given,
                ).frames
            clips.append(frames.cpu().mul(255).round().to(torch.uint8))
        return torch.cat(clips)

    def summarize(self, trainer: Trainer, clips: Tensor) -> dict[str, float]:
        """Write the clips as a GIF, and some of their frames as a strip."""
        stem = trainer.config.output_dir / f"samples/step_{trainer.state.step:08d}"
        stem.parent.mkdir(exist_ok=True)
        frames = rearrange(clips, "b f c h w -> f h (b w) c").numpy()
        write_motion(stem.with_suffix(".gif"), list(frames), [round(1000 / self.wan.config.fps)] * len(frames))
        shown = np.linspace(0, clips.shape[1] - 1, min(STRIP_FRAMES, clips.shape[1])).round().astype(int)
        strip = rearrange(clips[:, shown.tolist()], "b f c h w -> (b h) (f w) c").numpy()
        trainer.run.print(line("samples", write_picture(stem.with_suffix(".png"), strip)))
        return {"clips": float(len(clips))}


def _stop_if_requested(_pipeline: Any, _step: int, _time: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
    raise_if_stop_requested()
    return {}
