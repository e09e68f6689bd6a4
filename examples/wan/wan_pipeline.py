"""A Wan pipeline of diffusers: its parts, loaded when they are needed, and what can be trained of them."""

import importlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.machine import memory
from wan_flags import WanConfig
from wan_flow import ClipLatents

LIBRARIES = ("diffusers", "transformers")
"""Libraries of the parts of a pipeline. A file names their classes, and nothing else is imported for it."""
BYTES_PER_TRAINED_WEIGHT = 20
"""The weight, its gradient, two moments and the average, in float32."""
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


class Wan:
    """The parts of a pipeline.

    Args:
        config: the model, the size of its clips, and the part to train.
        device: where to compute.

    Raises:
        UsageError: if the model is no Wan pipeline, or cannot be trained as the flags require.
    """

    def __init__(self, config: WanConfig, device: torch.device) -> None:
        from diffusers import DiffusionPipeline

        self.config, self.device, self.name = config, device, f"--model {config.model}"
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            self.index: dict[str, Any] = dict(DiffusionPipeline.load_config(config.model))
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.name} cannot be found ({first_line(error)})") from error
        kind = str(self.index.get("_class_name"))
        if not kind.startswith("Wan"):
            raise UsageError(f"{self.name} is a {kind}, not a Wan pipeline of diffusers: pass another --model")
        self.boundary, (low, high) = self.index.get("boundary_ratio"), config.noise_range
        """Noise level between the two experts; None for a model of one."""
        second = self.boundary is not None and high <= self.boundary
        if self.boundary is not None and not second and low < self.boundary:
            raise UsageError(
                f"{self.name} has two experts, for noise levels above and below {self.boundary}: pass --noise_range "
                f"{self.boundary} 1 or 0 {self.boundary}"
            )
        self.expert = "transformer_2" if second else "transformer"
        self.token_times = bool(self.index.get("expand_timesteps"))
        if not self.token_times and config.first_frame:
            raise UsageError(
                f"--first_frame needs a model with a separate time for each token, such as Wan2.2-TI2V-5B, and "
                f"{self.name} has one time for all tokens: pass another --model"
            )

    def load(self, part: str, **options: Any) -> Any:
        """Load a part of the pipeline; networks are frozen."""
        library, name = self.index.get(part) or (None, None)
        if library not in LIBRARIES:
            raise UsageError(f"{self.name} has no {part}: pass a whole pipeline of diffusers")
        try:
            kind = getattr(importlib.import_module(str(library)), str(name))
            if issubclass(kind, nn.Module):
                options["use_safetensors"] = True
            loaded = kind.from_pretrained(self.config.model, subfolder=part, **options)
        except (OSError, ValueError, AttributeError, SafetensorError) as error:
            raise UsageError(f"{part} of {self.name} cannot be loaded ({first_line(error)})") from error
        return loaded.eval().requires_grad_(False).to(self.device) if isinstance(loaded, nn.Module) else loaded

    @cached_property
    def vae(self) -> Any:
        """The autoencoder of clips, float32."""
        return self.load("vae", torch_dtype=torch.float32)

    @cached_property
    def scheduler(self) -> Any:
        """The scheduler of the pipeline."""
        return self.load("scheduler")

    @property
    def time_shift(self) -> float:
        """The shift of ``--time_shift``, or of the model's scheduler."""
        known = self.scheduler.config
        return float(self.config.time_shift or known.get("flow_shift") or known.get("shift") or 1.0)

    @property
    def space(self) -> ClipLatents:
        """The space of the clips' latents, scaled as the model was trained."""
        config, vae = self.config, self.vae.config
        by_time, by_side = vae.scale_factor_temporal, vae.scale_factor_spatial
        frames = config.frames
        if (frames - 1) % by_time != 0:
            raise UsageError(f"--frames is {frames}; it must be 1 more than a multiple of {by_time}")
        for name, side in (("height", config.height), ("width", config.width)):
            if side % (2 * by_side) != 0:
                raise UsageError(f"--{name} is {side}; it must be a multiple of {2 * by_side}")
        shape = (vae.z_dim, 1 + (frames - 1) // by_time, config.height // by_side, config.width // by_side)
        return ClipLatents(shape, vae.latents_mean, vae.latents_std)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the expert to train.

        Raises:
            UsageError: if it is missing, is no plain Wan transformer, or does not fit into memory.
        """
        from diffusers import WanTransformer3DModel

        try:
            settings = dict(WanTransformer3DModel.load_config(self.config.model, subfolder=self.expert))
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.name} has no {self.expert} ({first_line(error)})") from error
        kind, given, channels = settings.get("_class_name"), settings["in_channels"], self.vae.config.z_dim
        if kind != "WanTransformer3DModel":
            raise UsageError(
                f"the {self.expert} of {self.name} is a {kind}, but only a WanTransformer3DModel can be trained"
            )
        if given != channels:
            raise UsageError(
                f"{self.name} takes {given} channels, but its latents have {channels}: models with a picture as "
                "additional input channels are not supported, so pass another --model"
            )
        if self.config.train == "full":
            with torch.device("meta"):
                weights = sum(p.numel() for p in WanTransformer3DModel.from_config(settings).parameters())
            cuda = self.device.type == "cuda"
            there = torch.cuda.get_device_properties(self.device).total_memory if cuda else memory()
            needed = BYTES_PER_TRAINED_WEIGHT * weights
            if needed > there:
                raise UsageError(
                    f"--train full needs {needed / 1e9:.3g} GB for {weights / 1e9:.3g} billion weights, but only "
                    f"{there / 1e9:.3g} GB are available: pass --train lora"
                )
        else:
            importlib.import_module("peft")  # a missing package ends the run before hours of encoding
        return settings

    @property
    def encoders(self) -> str:
        """The weights that encode clips and captions: a revision of the hub, or the files of a folder."""
        folder = Path(self.config.model).expanduser()
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(self.config.model, "model_index.json")).parent.name
        files = [file for part in ("vae", "text_encoder") for file in sorted((folder / part).glob("*"))]
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return repr((str(folder.resolve()), stats))

    def transformer(self) -> nn.Module:
        """Load the expert to train: all of it in float32, or frozen with a new LoRA in float32."""
        whole = self.config.train == "full"
        # Not .to(dtype), which would also round the parts that are kept in float32.
        network: Any = self.load(self.expert, torch_dtype=torch.float32 if whole else self.dtype)
        if whole:
            return network.requires_grad_(True)
        from peft import LoraConfig

        rank = self.config.lora_rank
        alpha: Any = self.config.lora_alpha or rank
        network.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(LORA_TARGETS)))
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return network

    def pipeline(self, transformer: nn.Module | None, *, with_text: bool = False) -> Any:
        """Return the pipeline with a transformer. Without text, it takes embeddings of captions."""
        from diffusers import WanImageToVideoPipeline, WanPipeline

        parts = {
            "tokenizer": self.load("tokenizer") if with_text else None,
            "text_encoder": self.load("text_encoder", torch_dtype=self.dtype) if with_text else None,
            "vae": self.vae,
            "scheduler": type(self.scheduler).from_config(self.scheduler.config),
            "transformer": transformer,
            "expand_timesteps": self.token_times,
        }
        if self.config.first_frame:
            return WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None)
        return WanPipeline(**parts)
