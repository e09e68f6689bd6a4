"""A Wan pipeline of diffusers as the network, the condition and the space of a rectified flow."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow.condition import Condition
from rectified_flow.errors import UsageError, first_line
from rectified_flow.latents.space import StoredLatents

TRAINING_TIMESTEPS = 1000
TEXT_TOKENS = 512
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


class ClipLatents(StoredLatents):
    """Latents of clips ``[b, c, f, h, w]``, which the pipeline decodes."""

    def decode(self, x: Tensor) -> Tensor:
        """Return latents as the autoencoder has them."""
        return self.unscaled(x)

    def render(self, data: Tensor) -> Tensor:
        """Refuse to render latents."""
        raise UsageError("latents of clips are rendered by the pipeline: pass --num_samples 0")


class Captions(Condition):
    """Embeddings of captions ``[b, tokens, d]``. The embedding of the empty caption stands for "none".

    Args:
        empty: the embedding of the empty caption ``[tokens, d]``.
    """

    def __init__(self, empty: Tensor) -> None:
        self.empty = empty

    def none(self, count: int, device: torch.device) -> Tensor:
        """Return rows of the empty caption."""
        self.empty = self.empty.to(device)
        return self.empty.expand(count, -1, -1)

    def embedding(self, dim: int) -> nn.Module:
        """Refuse: the transformer has its own embedding."""
        raise UsageError("captions are embedded by the transformer")


class WanNetwork(nn.Module):
    """A Wan transformer as the network of a flow. Both have noise at time 1.

    Args:
        transformer: a ``WanTransformer3DModel`` of diffusers.
        empty: embedding of the empty caption ``[tokens, d]``.
        source: origin of the frozen weights, which no checkpoint has.
    """

    def __init__(self, transformer: Any, empty: Tensor, source: str) -> None:
        super().__init__()
        self.transformer: Any = transformer
        self.frozen_source = source
        self.conditions = {"text": Captions(empty)}

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """Return the velocity at latents ``x`` ``[b, c, f, h, w]`` and times ``t`` ``[b]``."""
        dtype = self.transformer.dtype
        times = TRAINING_TIMESTEPS * t
        predicted: Tensor = self.transformer(x.to(dtype), times, text.to(dtype), return_dict=False)[0]
        return predicted.float()


class Wan:
    """A pipeline, with its networks frozen.

    Args:
        model: folder or hub id of the pipeline.
        size: frames, height and width of the clips.
        device: where to compute.
    """

    def __init__(self, model: str, size: tuple[int, int, int], device: torch.device) -> None:
        from diffusers import WanPipeline

        self.model, self.size, self.device = model, size, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            types = {"default": self.dtype, "vae": torch.float32}
            self.pipeline: Any = WanPipeline.from_pretrained(model, use_safetensors=True, torch_dtype=types)
            if self.pipeline.config.boundary_ratio is not None:
                raise ValueError("it has two transformers")
        except (OSError, ValueError) as error:
            raise UsageError(f"--model {model} cannot be loaded ({first_line(error)}): pass another --model") from error
        self.pipeline.to(device)
        self.vae, self.transformer = self.pipeline.vae, self.pipeline.transformer
        for network in (self.vae, self.transformer, self.pipeline.text_encoder):
            network.eval().requires_grad_(False)

    @cached_property
    def space(self) -> ClipLatents:
        """The space of the clips' latents, scaled as the model was trained."""
        config, (frames, height, width) = self.vae.config, self.size
        by_time, by_side = config.scale_factor_temporal, config.scale_factor_spatial
        if (frames - 1) % by_time != 0:
            raise UsageError(f"--frames is {frames}; it must be 1 more than a multiple of {by_time}")
        for name, side in (("height", height), ("width", width)):
            if side % (2 * by_side) != 0:
                raise UsageError(f"--{name} is {side}; it must be a multiple of {2 * by_side}")
        shape = (config.z_dim, 1 + (frames - 1) // by_time, height // by_side, width // by_side)
        return ClipLatents(shape, config.latents_mean, config.latents_std)

    @property
    def time_shift(self) -> float:
        """The shift of the times of the model's scheduler."""
        known = self.pipeline.scheduler.config
        return float(known.get("flow_shift") or known.get("shift") or 1.0)

    def embed(self, caption: str) -> Tensor:
        """Return the embedding of a caption ``[1, tokens, d]``."""
        how = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT_TOKENS}
        return self.pipeline.encode_prompt(caption, **how)[0]

    def add_lora(self, rank: int) -> None:
        """Add a new LoRA in float32 to the frozen transformer."""
        from peft import LoraConfig

        self.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LORA_TARGETS)))
        for parameter in self.transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
