"""A Wan pipeline of diffusers: its parts, loaded when they are needed, and the transformer to train."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.machine import free_memory
from wan_flags import WanConfig
from wan_flow import ClipLatents, FirstFrame

KINDS = ("WanPipeline", "WanImageToVideoPipeline")
BYTES_PER_TRAINED_WEIGHT = 20
"""The weight, its gradient, two moments and the average, in float32."""
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
EXPERTS = {None: "transformer", "high": "transformer", "low": "transformer_2"}


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
            raise UsageError(f"{self.name} cannot be loaded ({first_line(error)}): pass another --model") from error
        kind = str(self.index.get("_class_name"))
        if kind not in KINDS:
            raise UsageError(f"{self.name} is a {kind}, not a {' or '.join(KINDS)}: pass another --model")
        self.boundary: float | None = self.index.get("boundary_ratio")
        """Noise level between the two experts; None for a model of one."""
        if self.boundary is not None and config.expert is None:
            raise UsageError(f"{self.name} has two experts: pass --expert high or --expert low")
        if self.boundary is None and config.expert is not None:
            raise UsageError(f"{self.name} has one transformer for all noise levels: leave out --expert")
        self.expert = EXPERTS[config.expert]
        self.first_frame = self._first_frame()

    @property
    def noise_range(self) -> tuple[float, float]:
        """The lowest and the highest noise level at which the pipeline uses the expert."""
        if self.boundary is None:
            return 0.0, 1.0
        return (self.boundary, 1.0) if self.config.expert == "high" else (0.0, self.boundary)

    @property
    def time_shift(self) -> float:
        """The shift of ``--time_shift``, or of the model's scheduler."""
        known = self.pipeline.scheduler.config
        return float(self.config.time_shift or known.get("flow_shift") or known.get("shift") or 1.0)

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline without text encoder and transformers: it takes embeddings of captions."""
        return self.load_pipeline(with_text=False)

    @property
    def vae(self) -> Any:
        """The autoencoder of clips, float32."""
        return self.pipeline.vae

    def load_pipeline(self, *, with_text: bool) -> Any:
        """Load the pipeline without transformers; with a first frame, the one from image to video."""
        import diffusers

        kind = diffusers.WanPipeline if self.first_frame == "none" else diffusers.WanImageToVideoPipeline
        absent = ["transformer", "transformer_2"] + ["tokenizer", "text_encoder"] * (not with_text)
        absent += ["image_encoder", "image_processor"] * (self.first_frame != "none")
        parts: dict[str, Any] = dict.fromkeys(absent)
        if with_text:
            parts |= {"vae": self.vae, "scheduler": self.pipeline.scheduler}
        types = {"default": self.dtype, "vae": torch.float32}
        try:
            pipeline: Any = kind.from_pretrained(self.config.model, use_safetensors=True, torch_dtype=types, **parts)
        except (OSError, ValueError, AttributeError, SafetensorError) as error:
            raise UsageError(f"{self.name} cannot be loaded ({first_line(error)}): pass another --model") from error
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.eval().requires_grad_(False)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline.to(self.device)

    def load_transformer(self, part: str, dtype: torch.dtype) -> Any:
        """Load a transformer, frozen. It keeps some of its weights in float32 whatever the type."""
        from diffusers import WanTransformer3DModel

        try:
            how: dict[str, Any] = {"subfolder": part, "torch_dtype": dtype, "use_safetensors": True}
            network: Any = WanTransformer3DModel.from_pretrained(self.config.model, **how)
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"the {part} of {self.name} cannot be loaded ({first_line(error)})") from error
        return network.eval().requires_grad_(False).to(self.device)

    @cached_property
    def space(self) -> ClipLatents:
        """The space of the clips' latents, scaled as the model was trained."""
        config, vae = self.config, self.vae.config
        by_time, by_side = vae.scale_factor_temporal, vae.scale_factor_spatial
        if (config.frames - 1) % by_time != 0:
            raise UsageError(f"--frames is {config.frames}; it must be 1 more than a multiple of {by_time}")
        for name, side in (("height", config.height), ("width", config.width)):
            if side % (2 * by_side) != 0:
                raise UsageError(f"--{name} is {side}; it must be a multiple of {2 * by_side}")
        shape = (vae.z_dim, 1 + (config.frames - 1) // by_time, config.height // by_side, config.width // by_side)
        return ClipLatents(shape, vae.latents_mean, vae.latents_std)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the transformer to train.

        Raises:
            UsageError: if it is missing, or is another class than ``WanTransformer3DModel``.
        """
        from diffusers import WanTransformer3DModel

        try:
            settings = dict(WanTransformer3DModel.load_config(self.config.model, subfolder=self.expert))
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.name} has no {self.expert} ({first_line(error)}): pass another --model") from error
        kind = settings.get("_class_name")
        if kind != "WanTransformer3DModel":
            only = "but only a WanTransformer3DModel can be trained"
            raise UsageError(f"the {self.expert} of {self.name} is a {kind}, {only}: pass another --model")
        if settings.get("image_dim") is not None:
            unknown = "takes features of an image encoder, as Wan 2.1 does, which is not supported"
            raise UsageError(f"{self.name} {unknown}: pass a model of Wan 2.2")
        return settings

    @property
    def encoders(self) -> str:
        """The identity of the weights that encode: a revision of the hub, or the files of a folder."""
        folder = Path(self.config.model).expanduser()
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(self.config.model, "model_index.json")).parent.name
        files = [file for part in ("vae", "text_encoder") for file in sorted((folder / part).glob("*"))]
        return repr((str(folder.resolve()), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]))

    def check_memory(self) -> None:
        """Raise a UsageError if training all weights needs more memory than the device has."""
        from diffusers import WanTransformer3DModel

        with torch.device("meta"):
            weights = sum(each.numel() for each in WanTransformer3DModel.from_config(self.settings).parameters())
        is_cuda = self.device.type == "cuda"
        there = torch.cuda.get_device_properties(self.device).total_memory if is_cuda else free_memory()
        needed = BYTES_PER_TRAINED_WEIGHT * weights
        if needed > there:
            least = f"needs at least {needed / 1e9:.3g} GB for {weights / 1e9:.3g} billion weights"
            raise UsageError(
                f"--lora_rank 0 {least}, and each process has {there / 1e9:.3g} GB: pass a rank to train a LoRA"
            )

    def trained_transformer(self) -> Any:
        """Load the transformer to train: all of it in float32, or frozen with a new LoRA in float32."""
        rank = self.config.lora_rank
        if rank == 0:
            return self.load_transformer(self.expert, torch.float32).requires_grad_(True)
        from peft import LoraConfig

        network, alpha = self.load_transformer(self.expert, self.dtype), self.config.lora_alpha or rank
        lora: Any = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(LORA_TARGETS))  # type: ignore[arg-type]
        network.add_adapter(lora)
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return network

    def _first_frame(self) -> FirstFrame:
        """Return how the model takes the first frame."""
        from diffusers import AutoencoderKLWan

        vae = dict(AutoencoderKLWan.load_config(self.config.model, subfolder="vae"))
        latents, more = vae["z_dim"], self.settings["in_channels"] - vae["z_dim"]
        if more == latents + vae["scale_factor_temporal"]:
            return "channels"
        if more != 0:
            raise UsageError(
                f"{self.name} takes {latents + more} channels, and its latents have {latents}: pass another"
            )
        if self.config.first_frame and not self.index.get("expand_timesteps"):
            needed = "needs an image-to-video model, or a model with a time for each token, such as Wan2.2-TI2V-5B"
            raise UsageError(f"--first_frame {needed}: pass another --model")
        return "tokens" if self.config.first_frame else "none"
