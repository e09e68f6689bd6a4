"""Files that a run writes while it trains: the trained weights for the pipeline, and sampled clips."""

from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import interpolate

from clips import Clip
from encoded_clips import ClipDataset
from rectified_flow import Callback, Measurement, Trainer
from rectified_flow.errors import RunError, UsageError
from rectified_flow.runs.checkpoint import step_name
from rectified_flow.system.artifact import write_output
from rectified_flow.system.files import writing
from rectified_flow.system.signals import raise_if_stop_requested
from wan_flow import WanNetwork
from wan_pipeline import Wan

LORA_FILE, TRANSFORMER = "pytorch_lora_weights.safetensors", "transformer"
"""Names in the folder of the run, as the pipeline expects them."""
SHEET_FRAMES, SHEET_WIDTH = 8, 256
"""Number of frames in a row of a sheet, and the largest width of a frame there [px]."""


def transformer_of(trainer: Trainer) -> Any:
    """Return the transformer with averaged weights."""
    network = trainer.averaged_flow.network
    assert isinstance(network, WanNetwork)
    return network.transformer


class LoraFile(Callback):
    """The file of the averaged LoRA, written at each checkpoint; an error in writing it does not end the run."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write the file."""
        if trainer.accelerator.is_main_process:
            with trainer.run.log.tolerant("the LoRA", (OSError, UsageError, RunError, SafetensorError)):
                write_lora(trainer)


def write_lora(trainer: Trainer) -> None:
    """Write the averaged LoRA as a file for the pipeline's ``load_lora_weights``.

    The file has the settings of the LoRA: without them, an alpha other than the rank would be lost in loading.
    """
    from diffusers import WanPipeline
    from peft import get_peft_model_state_dict

    transformer, folder = transformer_of(trainer), trainer.config.output_dir
    layers: Any = get_peft_model_state_dict(transformer)
    settings = transformer.peft_config["default"].to_dict()
    with writing(folder / LORA_FILE), TemporaryDirectory(dir=folder) as stage:
        WanPipeline.save_lora_weights(
            stage, weight_name=LORA_FILE, transformer_lora_layers=layers, transformer_lora_adapter_metadata=settings
        )
        write_output(folder / LORA_FILE, (Path(stage) / LORA_FILE).read_bytes())


def write_transformer(trainer: Trainer) -> None:
    """Write the averaged transformer as a folder for ``WanTransformer3DModel.from_pretrained``."""
    folder = trainer.config.output_dir / TRANSFORMER
    with writing(folder):
        transformer_of(trainer).save_pretrained(folder)


class SampledClips(Measurement):
    """Clips of the first captions, sampled by the pipeline with its own scheduler; each rank samples a share.

    The main process writes the clips side by side as a video, and a sheet with a row of frames of each training clip
    above a row of the clip that was sampled with its caption.

    Args:
        wan: the model.
        clips: the training clips.
        dataset: their encodings.
        count: number of clips.
        steps: steps of the scheduler.
        every: training steps between previews.
    """

    def __init__(
        self, wan: Wan, clips: Sequence[Clip], dataset: ClipDataset, *, count: int, steps: int, every: int
    ) -> None:
        super().__init__("sampled_clips", min(count, len(clips)), every, untrained=False)
        self.wan, self.clips, self.dataset, self.steps = wan, clips, dataset, steps

    def measure(self, trainer: Trainer, numbers: list[int]) -> Tensor:
        """Return frames, uint8 ``[b, f, 3, h, w]``."""
        pipeline = self.wan.pipeline
        transformers = {self.wan.expert: transformer_of(trainer)}
        if self.wan.boundary is not None:  # the other expert is loaded for this preview only
            [other] = {"transformer", "transformer_2"} - transformers.keys()
            transformers[other] = self.wan.load_transformer(other, self.wan.dtype)
        pipeline.register_modules(**transformers)
        try:
            with torch.autocast(trainer.device.type, enabled=False):  # as users call the pipeline
                return torch.cat([self._sample(number) for number in numbers])
        finally:
            pipeline.register_modules(**dict.fromkeys(transformers))

    def summarize(self, trainer: Trainer, clips: Tensor) -> dict[str, Any]:
        """Write the video and the sheet."""
        folder, step = trainer.config.output_dir / "samples", trainer.state.step
        folder.mkdir(exist_ok=True)
        trainer.run.log.samples(step, sheet(torch.stack((self._training_clips(len(clips)), clips), dim=1)))
        video = encode_video(rearrange(clips, "b f c h w -> f h (b w) c").numpy(), self.wan.config.fps)
        write_output(folder / f"{step_name(step)}.mp4", video, durable=False)
        return {"clips": len(clips), "steps": self.steps}

    def _sample(self, number: int) -> Tensor:
        """Return the frames of a clip, uint8 ``[1, f, 3, h, w]``."""
        config, device = self.wan.config, self.wan.device
        given = {} if self.wan.first_frame == "none" else {"image": self._decode(number, 1).float() / 255}
        frames: Tensor = self.wan.pipeline(
            prompt_embeds=self.dataset.read_batch([number])["text"].float().to(device),
            negative_prompt_embeds=self.dataset.empty[None].to(device),
            guidance_scale=config.guidance_scale,
            height=config.height,
            width=config.width,
            num_frames=config.frames,
            num_inference_steps=self.steps,
            generator=torch.Generator("cpu").manual_seed(number),
            output_type="pt",
            callback_on_step_end=_stop_if_requested,
            **given,
        ).frames
        return frames.cpu().mul(255).round().to(torch.uint8)

    def _training_clips(self, count: int) -> Tensor:
        return torch.stack([self._decode(number, self.wan.config.frames) for number in range(count)])

    def _decode(self, number: int, frames: int) -> Tensor:
        config = self.wan.config
        return self.clips[number].decode(frames, config.height, config.width, config.fps)


def sheet(clips: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a sheet ``[h, w, 3]`` of some frames of clips, uint8 ``[b, r, f, 3, h, w]``, in ``r`` rows for each."""
    frames, height, width = clips.shape[2], *clips.shape[4:]
    shown = np.linspace(0, frames - 1, min(SHEET_FRAMES, frames)).round().astype(int)
    chosen = clips[:, :, shown.tolist()]
    if width > SHEET_WIDTH:
        size = (round(height * SHEET_WIDTH / width), SHEET_WIDTH)
        small = interpolate(chosen.flatten(0, 2).float(), size, mode="bilinear", antialias=True)
        chosen = small.round().clamp(0, 255).to(torch.uint8).unflatten(0, chosen.shape[:3])
    pixels: np.ndarray[Any, np.dtype[np.uint8]] = rearrange(chosen, "b r f c h w -> (b r h) (f w) c").numpy()
    return pixels


def encode_video(frames: np.ndarray[Any, np.dtype[np.uint8]], fps: float) -> bytes:
    """Return the bytes of an mp4 file with frames ``[f, h, w, 3]``, whose sides are even."""
    import av

    content = BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


def _stop_if_requested(_pipeline: Any, _step: int, _time: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
    raise_if_stop_requested()
    return {}
