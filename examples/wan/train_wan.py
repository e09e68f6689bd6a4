"""Fine-tune a Wan video model of diffusers on a folder of clips with captions, as a LoRA or in full.

The folder has videos (mp4, webm, gif) or folders of frames, each with a caption in a .txt file beside it, in
caption.txt, or in metadata.jsonl. Clips and captions are encoded once, by all GPUs together, into the cache.
Needs `pip install -e ".[latent]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_wan:train", "train_wan:WanFlags", __doc__)

import importlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from einops import rearrange
from safetensors import SafetensorError
from torch import Tensor, nn

from clips import Clip, clips_fingerprint, find_clips
from rectified_flow import Callback, Measurement, RectifiedFlow, Trainer, TrainingConfig
from rectified_flow.cli.parts import join
from rectified_flow.cli.train_flags import ProgramConfig, check_folders
from rectified_flow.condition import Condition
from rectified_flow.data.build import default_cache_dir
from rectified_flow.data.latents import LatentDataset
from rectified_flow.data.store import LATENTS_FILE
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.fill import fill_once
from rectified_flow.errors import UsageError, first_line, require
from rectified_flow.flags import Flags, Natural, Positive, PositiveNumber, Probability, default_is, plain, recorded
from rectified_flow.flows.flow import expand
from rectified_flow.flows.times import TruncatedLogitNormal
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import program_flags, read_config
from rectified_flow.runs.resume import check_start
from rectified_flow.spaces.latents import StoredLatents
from rectified_flow.system.files import prepare_folder, replace_file
from rectified_flow.system.machine import memory
from rectified_flow.system.pictures import write_motion, write_picture
from rectified_flow.system.signals import raise_if_stop_requested
from rectified_flow.system.terminal import line

CLIPS_VERSION = 1
TEXT_FILE, TEXT_TOKENS = "text.float16", 512
LIBRARIES = ("diffusers", "transformers")
"""Where the parts of a pipeline come from; a file names their classes, and nothing else is imported for it."""
TRAINING_TIMESTEPS = 1000
BYTES_PER_TRAINED_WEIGHT = 20
"""The weight, its gradient, two moments and the average, in float32."""
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
STRIP_FRAMES = 8


@dataclass(frozen=True)
class WanConfig(Flags):
    """The model, the clips and what is learned of them."""

    model: str = ""
    """Folder or hub id of a Wan pipeline in the form of diffusers, such as Wan-AI/Wan2.2-TI2V-5B-Diffusers."""
    dataset_path: Path | None = None
    """Folder of clips with captions."""
    frames: Positive = 81
    """Frames of a clip; 1 more than a multiple of 4."""
    height: Positive = 480
    """Height of a frame [px]."""
    width: Positive = 832
    """Width of a frame [px]."""
    fps: PositiveNumber = 16.0
    """Frames a second; of a faster video, some are left out."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Where encoded clips are kept."""
    train: Literal["lora", "full"] = "lora"
    """Train low-rank additions to the attention's weights, or all weights."""
    lora_rank: Positive = 32
    """Rank of the additions."""
    lora_alpha: Annotated[PositiveNumber | None, default_is("the rank")] = None
    """They are multiplied by this over the rank."""
    noise_range: tuple[float, float] = (0.0, 1.0)
    """Least and greatest noise level of training; one expert of a model of two has 0.875 1 or 0 0.875."""
    time_shift: Annotated[PositiveNumber | None, default_is("of the model's scheduler")] = None
    """Move times towards the noise (above 1)."""
    first_frame: bool = False
    """Learn to continue a first frame, which is given without noise; needs tokens with times of their own."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""
    caption_dropout: Probability = 0.1
    """Probability of training a clip without its caption."""
    preview_clips: Natural = 2
    """Clips that are drawn every --sample_every steps, with the first captions; 0 for none."""
    preview_steps: Positive = 30
    """Steps of the pipeline's own scheduler."""
    preview_guidance: float = 5.0
    """Guidance scale of previews."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.model), "--model is missing: pass the folder or hub id of a Wan pipeline of diffusers")
        require(self.dataset_path is not None, "--dataset_path is missing: pass a folder of clips with captions")
        low, high = self.noise_range
        require(0 <= low < high <= 1, f"--noise_range is {low:g} {high:g}; it must be two numbers from 0 to 1, rising")


@dataclass(frozen=True)
class WanFlags:
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
        require(self.run.num_samples == 0, "--num_samples is for pictures: pass --preview_clips instead")
        check_folders(self.run, self.wan.dataset_path, self.wan.cache_dir)


# The model


class Wan:
    """The parts of a pipeline, each loaded when it is needed.

    Args:
        config: names the model and what is trained of it.
        device: where to compute.

    Raises:
        UsageError: if it is no Wan pipeline, or has no part for what is asked.
    """

    def __init__(self, config: WanConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.index = self._find()
        boundary, (low, high) = self.index.get("boundary_ratio"), config.noise_range
        self.has_two_experts = boundary is not None
        require(
            boundary is None or low >= boundary or high <= boundary,
            f"--model {config.model} has two experts, for noise levels above and below {boundary}: pass --noise_range "
            f"{boundary} 1 or 0 {boundary}",
        )
        self.expert = "transformer_2" if boundary is not None and high <= boundary else "transformer"
        require(
            not config.first_frame or bool(self.index.get("expand_timesteps")),
            f"--first_frame needs a model whose tokens have times of their own, such as Wan2.2-TI2V-5B, which "
            f"{config.model} is not",
        )

    def _find(self) -> dict[str, Any]:
        from diffusers import DiffusionPipeline

        try:
            index, _ = DiffusionPipeline.load_config(self.config.model, return_unused_kwargs=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {self.config.model} cannot be found ({first_line(error)})") from error
        kind = str(index.get("_class_name"))
        require(kind.startswith("Wan"), f"--model {self.config.model} is a {kind}, not a Wan pipeline of diffusers")
        return dict(index)

    def load(self, part: str, **options: Any) -> Any:
        """A part of the pipeline; networks are frozen."""
        library, name = self.index.get(part) or (None, None)
        require(library in LIBRARIES, f"--model {self.config.model} has no {part}: pass a whole pipeline of diffusers")
        try:
            kind = getattr(importlib.import_module(str(library)), str(name))
            if issubclass(kind, nn.Module):
                options["use_safetensors"] = True
            loaded = kind.from_pretrained(self.config.model, subfolder=part, **options)
        except (OSError, ValueError, AttributeError, SafetensorError) as error:
            raise UsageError(f"{part} of --model {self.config.model} cannot be loaded ({first_line(error)})") from error
        return loaded.eval().requires_grad_(False).to(self.device) if isinstance(loaded, nn.Module) else loaded

    @cached_property
    def vae(self) -> Any:
        """The autoencoder of clips, float32."""
        return self.load("vae", torch_dtype=torch.float32)

    @cached_property
    def scheduler(self) -> Any:
        """What the pipeline samples with."""
        return self.load("scheduler")

    @property
    def time_shift(self) -> float:
        """The shift of ``--time_shift``, or of the model's scheduler."""
        known = self.scheduler.config
        return float(self.config.time_shift or known.get("flow_shift") or known.get("shift") or 1.0)

    @property
    def space(self) -> "ClipLatents":
        """The space of the clips' latents, scaled as the model was trained."""
        config = self.vae.config
        frames, height, width = self.config.frames, self.config.height, self.config.width
        by_time, by_side = config.scale_factor_temporal, config.scale_factor_spatial
        require((frames - 1) % by_time == 0, f"--frames is {frames}; it must be 1 more than a multiple of {by_time}")
        for name, side in (("height", height), ("width", width)):
            require(side % (2 * by_side) == 0, f"--{name} is {side}; it must be a multiple of {2 * by_side}")
        shape = (config.z_dim, 1 + (frames - 1) // by_time, height // by_side, width // by_side)
        return ClipLatents(shape, config.latents_mean, config.latents_std)

    @property
    def text_dim(self) -> int:
        """Numbers in the embedding of a token."""
        return int(self._settings["text_dim"])

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Of the expert."""
        from diffusers import WanTransformer3DModel

        try:
            settings = dict(WanTransformer3DModel.load_config(self.config.model, subfolder=self.expert))
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {self.config.model} has no {self.expert} ({first_line(error)})") from error
        kind = settings.get("_class_name")
        require(
            kind == "WanTransformer3DModel",
            f"the {self.expert} of --model {self.config.model} is a {kind}, and only a WanTransformer3DModel can be "
            "trained here",
        )
        return settings

    def check(self) -> None:
        """Refuse what cannot be trained, before clips take hours to encode.

        Raises:
            UsageError: if the model has further channels, or does not fit into memory as a whole.
        """
        given, channels = self._settings["in_channels"], (self.space.shape or (0,))[0]
        require(
            given == channels,
            f"--model {self.config.model} takes {given} channels and its latents have {channels}: models that take a "
            "picture as further channels cannot be trained here",
        )
        if self.config.train == "full":
            self._require_room_for_all()
        else:
            importlib.import_module("peft")

    @property
    def weights(self) -> str:
        """Which weights encode the clips: a revision of the hub, or the files of a folder."""
        folder = Path(self.config.model).expanduser()
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(self.config.model, "model_index.json")).parent.name
        files = [file for part in ("vae", "text_encoder") for file in sorted((folder / part).glob("*"))]
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return repr((str(folder.resolve()), stats))

    def transformer(self) -> nn.Module:
        """The expert to train: the whole in float32, or with a new LoRA in float32."""
        whole = self.config.train == "full"
        # Not .to(dtype), which would also round the parts that are kept in float32.
        network: Any = self.load(self.expert, torch_dtype=torch.float32 if whole else self.dtype)
        if whole:
            return network.requires_grad_(True)
        from peft import LoraConfig

        rank = self.config.lora_rank
        alpha = self.config.lora_alpha or rank
        settings: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": list(LORA_TARGETS)}
        network.add_adapter(LoraConfig(**settings))
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return network

    def _require_room_for_all(self) -> None:
        from diffusers import WanTransformer3DModel

        with torch.device("meta"):
            weights = sum(p.numel() for p in WanTransformer3DModel.from_config(self._settings).parameters())
        needed = BYTES_PER_TRAINED_WEIGHT * weights
        cuda = self.device.type == "cuda"
        there = torch.cuda.get_device_properties(self.device).total_memory if cuda else memory()
        require(
            needed <= there,
            f"--train full needs {needed / 1e9:.3g} GB for {weights / 1e9:.3g} billion weights, and there are "
            f"{there / 1e9:.3g} GB: pass --train lora",
        )

    def pipeline(self, transformer: nn.Module | None, *, with_text: bool = False) -> Any:
        """The pipeline of these parts; without text, it takes embeddings of captions."""
        from diffusers import WanImageToVideoPipeline, WanPipeline

        encoder = self.load("text_encoder", torch_dtype=self.dtype) if with_text else None
        tokenizer = self.load("tokenizer") if with_text else None
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        parts = {"tokenizer": tokenizer, "text_encoder": encoder, "vae": self.vae, "scheduler": scheduler}
        parts |= {"transformer": transformer, "expand_timesteps": bool(self.index.get("expand_timesteps"))}
        if self.config.first_frame:
            return WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None)
        return WanPipeline(**parts)


class ClipLatents(StoredLatents):
    """Latents of clips ``[b, c, f, h, w]``, which the pipeline decodes."""

    def decode(self, x: Tensor) -> Tensor:
        return self.unscaled(x)

    def render(self, data: Tensor) -> Tensor:
        raise UsageError("latents of clips are drawn by the pipeline")


class Captions(Condition):
    """Embeddings of captions ``[b, tokens, d]``; that of the empty one stands for "none".

    Args:
        empty: the embedding of the empty caption ``[tokens, d]``.
    """

    def __init__(self, empty: Tensor) -> None:
        self.empty = empty

    def none(self, count: int, device: torch.device) -> Tensor:
        self.empty = self.empty.to(device)
        return self.empty.expand(count, -1, -1)

    def is_none(self, values: Tensor) -> Tensor:
        return (values == self.none(len(values), values.device)).flatten(1).all(dim=1)

    def draw(self, name: str, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """No caption."""
        return self.none(count, device)

    def embedding(self, dim: int) -> nn.Module:
        raise UsageError("captions are embedded by the model itself")


class WanNetwork(nn.Module):
    """A Wan transformer as the network of a flow: time 1 is noise for both.

    Args:
        transformer: of diffusers.
        empty: embedding of the empty caption ``[tokens, d]``.
        source: where its frozen weights come from, as they stand in no checkpoint.
    """

    def __init__(self, transformer: Any, empty: Tensor, source: str) -> None:
        super().__init__()
        self.transformer: Any = transformer
        self.frozen_source = source
        self.conditions = {"text": Captions(empty)}

    def forward(self, x: Tensor, t: Tensor, text: Tensor, *, known_frames: Positive = 0, **others: Tensor) -> Tensor:
        """The velocity at ``x`` ``[b, c, f, h, w]`` and times ``t`` ``[b]``.

        Args:
            x: latents.
            t: times.
            text: embeddings of captions ``[b, tokens, d]``.
            known_frames: how many frames of latents are without noise: the time of their tokens is 0.
            others: none, as the model knows no others.

        Raises:
            UsageError: if it is asked for an average velocity, or given another condition.
        """
        require(not others, f"a Wan transformer takes no {', '.join(others)}: train it as a rectified flow")
        config = self.transformer.config
        times = TRAINING_TIMESTEPS * t
        if known_frames:
            frames, tokens = x.shape[2] // config.patch_size[0], prod(x.shape[3:]) // prod(config.patch_size[1:])
            times = times[:, None].repeat(1, frames * tokens)
            times[:, : known_frames * tokens] = 0
        dtype = self.transformer.dtype
        predicted: Tensor = self.transformer(x.to(dtype), times, text.to(dtype), return_dict=False)[0]
        return predicted.float()


class ClipFlow(RectifiedFlow):
    """A rectified flow of clips whose first frame may be given.

    Args:
        network: a :class:`WanNetwork`.
        first_frame: give it, without noise, and learn the others.
        settings: those of :class:`RectifiedFlow`.
    """

    def __init__(self, network: WanNetwork, *, first_frame: bool, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.first_frame = first_frame

    def loss(self, x_0: Tensor, noise: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The mean squared error of the velocity, over the frames that are not given."""
        known = int(self.first_frame)
        noisy = torch.lerp(x_0, noise, expand(t, x_0))
        x_t = torch.cat((x_0[:, :, :known], noisy[:, :, known:]), dim=2)
        error = self.network(x_t, t, known_frames=known, **conditions) - (noise - x_0)
        return error[:, :, known:].square().mean()


# The clips


class ClipDataset(LatentDataset):
    """Encoded clips: ``latents`` float16 ``[1, 2, c, f, h, w]`` and ``text`` float16 ``[tokens, d]``.

    The store's last row has the empty caption and no clip.
    """

    def __len__(self) -> int:
        return self._length - 1

    @property
    def description(self) -> str:
        shape = " x ".join(map(str, self.info.shapes[LATENTS_FILE][2:]))
        return f"{self.info.source}: {len(self)} clips, as latents of {shape} by {self.encoded.autoencoder}"

    @property
    def empty(self) -> Tensor:
        """The embedding of the empty caption."""
        return torch.from_numpy(self.entries["text"][len(self)].astype(np.float32))


def encode_clips(wan: Wan, clips: Sequence[Clip], state: PartialState) -> ClipDataset:
    """All clips and captions, encoded by all processes together unless they are there. Collective.

    Raises:
        UsageError: if a clip cannot be read, or is too short, or the cache cannot be written.
        RunError: if the disk is full.
    """
    config, space, (_, kind) = wan.config, wan.space, wan.index["vae"]
    size = config.frames, config.height, config.width, config.fps
    key = on_main(state, lambda: _key(CLIPS_VERSION, clips_fingerprint(clips, times=True), size, wan.weights))
    same = _key(clips_fingerprint(clips, times=False), size)  # a run goes on with clips that were copied
    folder = prepare_folder("cache_dir", config.cache_dir or default_cache_dir())
    rows = {LATENTS_FILE: (1, 2, *(space.shape or ())), TEXT_FILE: (TEXT_TOKENS, wan.text_dim)}
    writer = StoreWriter(folder / f"clips-{key[:16]}", len(clips) + 1, rows, "clips")
    encoder = _Encoder(wan, clips)

    def finish() -> None:
        latents = {"autoencoder": kind, "pictures": same, "mean": space.mean, "std": space.std}
        more = {"source": str(config.dataset_path), "image_size": config.height, "latents": latents}
        writer.finish(np.full(writer.length, -1), **more)

    fill_once(writer, state, encoder.rows, finish, doing="encoding", batch_size=1)
    return ClipDataset(writer.path)


def _key(*values: object) -> str:
    return blake2b(repr(values).encode(), digest_size=16).hexdigest()


class _Encoder:
    """Encodes clips and captions; the models are loaded with the first.

    Args:
        wan: the model.
        clips: all clips.
    """

    def __init__(self, wan: Wan, clips: Sequence[Clip]) -> None:
        self.wan, self.clips = wan, clips

    @torch.no_grad()
    def rows(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The row of each number; the number after the last clip has the empty caption."""
        each = [self._row(number) for number in numbers]
        latents, text = (torch.cat(parts).half() for parts in zip(*each, strict=True))
        for number, values in zip(numbers, each, strict=True):
            finite = all(bool(value.half().isfinite().all()) for value in values)
            where = self.clips[number].path if number < len(self.clips) else "the empty caption"
            require(finite, f"the encoding of {where} is not finite, or too large for float16: remove it")
        return {LATENTS_FILE: latents, TEXT_FILE: text}

    def _row(self, number: int) -> tuple[Tensor, Tensor]:
        config, space = self.wan.config, self.wan.space
        clip = self.clips[number] if number < len(self.clips) else None
        caption = "" if clip is None else clip.caption
        text, _ = self._pipeline.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
        )
        if clip is None:
            return torch.zeros(1, 1, 2, *(space.shape or ())), text.cpu()
        frames = clip.decode(config.frames, config.height, config.width, config.fps).to(self.wan.device)
        pixels = rearrange(frames.float() / 127.5 - 1, "f c h w -> 1 c f h w")
        distribution = self.wan.vae.encode(pixels).latent_dist
        return torch.stack((distribution.mean, distribution.std), dim=1)[:, None].cpu(), text.cpu()

    @cached_property
    def _pipeline(self) -> Any:
        return self.wan.pipeline(None, with_text=True)


# During training


def transformer_of(trainer: Trainer) -> nn.Module:
    """The transformer with averaged weights."""
    network = trainer.averaged_flow.network
    assert isinstance(network, WanNetwork)
    transformer: nn.Module = network.transformer
    return transformer


class LoraFile(Callback):
    """Writes the averaged LoRA as a file that ``load_lora_weights`` of the pipeline takes, at each checkpoint.

    The file carries the LoRA's settings: without them, an alpha other than the rank would be lost on loading.
    """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        if trainer.accelerator.is_main_process:
            try:
                write_lora(transformer_of(trainer), trainer.config.output_dir / "lora")
            except (OSError, SafetensorError) as error:  # a full disk does not end the run
                trainer.run.print(f"warning: the LoRA of step {trainer.state.step} could not be written ({error})")


def write_lora(transformer: nn.Module, folder: Path) -> Path:
    """Write the LoRA of a transformer for ``load_lora_weights``; with ``load_into_transformer_2=True`` for the second.

    Raises:
        OSError: if that fails.
    """
    from diffusers import WanPipeline
    from peft import get_peft_model_state_dict

    config: Any = transformer.peft_config
    stage = folder.with_name(f"{folder.name}.writing")
    WanPipeline.save_lora_weights(
        stage,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=config["default"].to_dict(),
    )
    folder.mkdir(parents=True, exist_ok=True)
    [written] = stage.iterdir()
    path = folder / written.name
    replace_file(path, written.read_bytes())
    shutil.rmtree(stage)
    return path


def _end_if_asked(_pipeline: Any, _step: int, _time: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
    """Called by the pipeline after each step."""
    raise_if_stop_requested()
    return {}


class Previews(Measurement):
    """Clips of the first captions, drawn by the pipeline with its own scheduler; each rank draws a share.

    Args:
        wan: the model.
        clips: what it is trained on.
        dataset: their encodings.
        every: steps between previews.
    """

    def __init__(self, wan: Wan, clips: Sequence[Clip], dataset: ClipDataset, every: int) -> None:
        super().__init__("previews", min(wan.config.preview_clips, len(clips)), every)
        self.wan, self.clips, self.dataset = wan, clips, dataset

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        """Frames, uint8 ``[b, f, 3, h, w]``."""
        config, empty = self.wan.config, self.dataset.empty[None].to(trainer.device)
        pipeline = self.wan.pipeline(transformer_of(trainer))
        pipeline.set_progress_bar_config(disable=True)
        drawn = [torch.empty(0, config.frames, 3, config.height, config.width, dtype=torch.uint8)]
        for number in numbers:
            text = self.dataset.read_batch([number])["text"].to(trainer.device).float()
            given = {"prompt_embeds": text, "negative_prompt_embeds": empty, "guidance_scale": config.preview_guidance}
            if config.first_frame:
                first = self.clips[number].decode(1, config.height, config.width, config.fps)
                given["image"] = first.float() / 255
            with torch.autocast(trainer.device.type, enabled=False):  # as the pipeline is used
                frames = pipeline(
                    **given,
                    height=config.height,
                    width=config.width,
                    num_frames=config.frames,
                    num_inference_steps=config.preview_steps,
                    generator=torch.Generator("cpu").manual_seed(number),
                    output_type="pt",
                    callback_on_step_end=_end_if_asked,
                ).frames
            drawn.append(frames.cpu().mul(255).round().to(torch.uint8))
        return torch.cat(drawn)

    def summarize(self, trainer: Trainer, clips: Tensor) -> dict[str, float]:
        stem = trainer.config.output_dir / f"samples/step_{trainer.state.step:08d}"
        stem.parent.mkdir(exist_ok=True)
        frames = rearrange(clips, "b f c h w -> f h (b w) c").numpy()
        write_motion(stem.with_suffix(".gif"), list(frames), [round(1000 / self.wan.config.fps)] * len(frames))
        shown = np.linspace(0, clips.shape[1] - 1, min(STRIP_FRAMES, clips.shape[1])).round().astype(int)
        strip = rearrange(clips[:, shown.tolist()], "b f c h w -> (b h) (f w) c").numpy()
        trainer.run.print(line("samples", write_picture(stem.with_suffix(".png"), strip)))
        return {"clips": float(len(clips))}


IDENTITY = ("model", "train", "lora_rank", "lora_alpha", "noise_range", "time_shift", "first_frame")
"""Flags that make a run another one if they change."""


def check_same_run(flags: WanFlags) -> None:
    """Raise a UsageError if the newest checkpoint is of a run with another model or objective."""
    now = plain(flags)
    for newest in checkpoint.list_checkpoints(flags.run.checkpoints)[-1:]:
        then = program_flags(read_config(newest / checkpoint.CONFIG_FILE))
        for name in IDENTITY:
            require(
                then.get(name) == now[name],
                f"{newest} was trained with --{name} {then.get(name)}, and this run has {now[name]}: choose another "
                "--output_dir",
            )


def train(flags: WanFlags) -> bool:
    """Train; returns whether it finished."""
    state, config = join(flags), flags.wan
    set_seed(flags.run.seed)
    assert config.dataset_path is not None
    on_main(state, lambda: check_start(flags.run))
    on_main(state, lambda: check_same_run(flags))
    clips, batch = find_clips(config.dataset_path), flags.run.split_batch(state.num_processes)
    require(
        len(clips) >= batch.total,
        f"--dataset_path {config.dataset_path} has {len(clips)} clips, fewer than one global batch ({batch}): pass a "
        "smaller --batch_size",
    )
    wan = Wan(config, state.device)
    wan.check()
    dataset = encode_clips(wan, clips, state)
    transformer: Any = wan.transformer()
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    low, high = config.noise_range
    flow = ClipFlow(
        WanNetwork(transformer, dataset.empty, f"{config.model}/{wan.expert}"),
        first_frame=config.first_frame,
        space=wan.space,
        time_distribution=TruncatedLogitNormal(0.0, 1.0, wan.time_shift, low, high),
        condition_dropout=config.caption_dropout,
    )
    report: Callable[[str], object] = print if state.is_main_process else lambda _line: None
    report(line("times", f"logit-normal, shift {wan.time_shift:g}, from {low:g} to {high:g}, of {wan.expert}"))
    callbacks: list[Callback] = [LoraFile()] if config.train == "lora" else []
    if wan.has_two_experts and config.preview_clips:
        report(line("samples", "none, as one of two experts draws no clip alone"))
    elif config.preview_clips:
        callbacks.append(Previews(wan, clips, dataset, flags.run.sample_every))
    return Trainer(flow, dataset, flags.run, callbacks=callbacks, flags=recorded(flags)).train()
