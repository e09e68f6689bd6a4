"""Autoencoders, which convert between pictures and latents. They are frozen, and no checkpoint contains them.

``Small`` is in the package; its latents have 8 channels and 1/8 of the side. Others are classes of diffusers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from hashlib import blake2b
from math import gcd
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow.errors import UsageError, first_line
from rectified_flow.networks.pretrained import Pretrained
from rectified_flow.registry import Document, register
from rectified_flow.system.files import read_bytes

WEIGHTS = Path(__file__).with_name("small.safetensors")
MOST = 64  # largest factor of a side that an autoencoder is expected to need
CHANNELS, BOUND = 8, 3.0  # number of channels of the latents of ``Small``, and the bound of their values


class Autoencoder(ABC):
    """A map from pictures ``[b, 3, h, w]`` in [-1, 1] to latents ``[b, c, h, w]`` and back, on any device.

    Both directions also work on torch's meta device, without weights. Register a subclass and keep its constructor's
    arguments as attributes, and checkpoints can name it.
    """

    name: str
    """The name in reports."""
    fingerprint: str
    """A hash that differs between autoencoders that encode differently."""
    encodes_in_step: ClassVar[bool] = False
    """Whether a training step can encode its pictures, after it has augmented them, instead of reading stored latents.
    ``encode`` must then return no standard deviation, and cost little beside the step."""
    pixels_at_once: ClassVar[Mapping[str, int]] = {}
    """Pixels encoded or decoded at once, by device type, where the default would leave the device idle."""

    @abstractmethod
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and standard deviation of the latents' distribution, float32; None where it is a single point."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1], float32."""

    def shape_of(self, height: int, width: int | None = None) -> tuple[int, ...]:
        """Return the shape ``(k, c, h, w)`` of an encoded picture: a mean, and for ``k = 2`` a standard deviation.

        The shape is found on torch's meta device, where nothing is computed. Without ``width``, the picture is square.

        Raises:
            UsageError: if the sides are not divisible; it names the nearest size of the same aspect ratio that is.
        """
        width = width or height
        if (shape := self._shape_of(height, width)) is not None:
            return shape
        common = gcd(height, width)
        unit, high, wide = min(height, width) // common, height // common, width // common
        near = sorted(range(max(1, common - MOST), common + MOST + 1), key=lambda each: (abs(each - common), -each))
        fits = next((each for each in near if self._shape_of(each * high, each * wide) is not None), None)
        remedy = "pass another `autoencoder`" if fits is None else f"pass {unit * fits}"
        size = f"`image_size` {unit * common}"
        raise UsageError(f"{size} cannot be halved as often as `autoencoder` {self.name} does: {remedy}")

    def _shape_of(self, height: int, width: int) -> tuple[int, ...] | None:
        """Return the shape of an encoded picture; None if a side is not divisible."""
        pictures = torch.zeros(1, 3, height, width, device="meta")
        with suppress(RuntimeError):
            mean, std = self.encode(pictures)
            if self.decode(mean).shape == pictures.shape:
                return 1 if std is None else 2, *mean.shape[1:]
        return None

    def prepare(self, device: torch.device) -> None:  # noqa: B027, as most have nothing to load
        """Load the weights, if there are any, onto ``device``."""


def in_float32(x: Tensor) -> AbstractContextManager[object]:
    """Return the context without autocast, which the meta device does not have."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@register
class PretrainedAutoencoder(Pretrained, Autoencoder):  # type: ignore[override]
    """An autoencoder class of diffusers, such as ``AutoencoderKL``, in float32. Those of videos encode single frames.

    Args:
        source: a folder or hub id, of the autoencoder or of a pipeline that has one.
        fingerprint: the hash of the weights, if they must be the same as in training; None takes any.
    """

    flag = "autoencoder"

    @staticmethod
    @override
    def identity(source: str) -> tuple[object, nn.Module]:
        module, config = _load(source)
        settings = {name: value for name, value in config.items() if not name.startswith("_")}
        return (type(module).__name__, sorted(settings.items())), module

    @override
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        encoded = self._call("encode", pictures)
        distribution = getattr(encoded, "latent_dist", None)
        if distribution is None:
            return _without_frames(encoded[0]), None
        return _without_frames(distribution.mode()), _without_frames(distribution.std)

    @override
    def decode(self, latents: Tensor) -> Tensor:
        return _without_frames(self._call("decode", latents).sample)

    @override
    def prepare(self, device: torch.device) -> None:
        self._module(device)

    @torch.no_grad()
    def _call(self, method: str, x: Tensor) -> Any:
        """Call a method of the module in float32, with a video of one frame for a module with 3D convolutions."""
        module = self._module(x.device)
        takes_frames = any(isinstance(each, nn.Conv3d) for each in module.modules())
        with in_float32(x):
            return getattr(module, method)(x.float()[:, :, None] if takes_frames else x.float())

    def _module(self, device: torch.device) -> nn.Module:
        if device.type == "meta":
            return _load(self.source, weights=False)[0]
        self.check()
        return _load(self.source)[0].to(device)


def _without_frames(x: Tensor) -> Tensor:
    """Return the single frame of a video ``[b, c, 1, h, w]``, or a picture unchanged."""
    return x[:, :, 0] if x.ndim == 5 else x


@cache
def _load(source: str, *, weights: bool = True) -> tuple[nn.Module, Document]:
    """Return the module, shared by all flows of this process, and its settings; without weights on the meta device."""
    import diffusers  # takes seconds

    for subfolder in ("vae", None):  # a pipeline has its autoencoder in a subfolder
        try:
            config = diffusers.AutoModel.load_config(source, subfolder=subfolder)
            break
        except OSError as error:
            reason = first_line(error)
    else:
        raise UsageError(f"`autoencoder` {source} cannot be found ({reason}): pass small, a folder or a hub id")
    name = str(config.get("_class_name"))
    kind: Any = getattr(diffusers, name, None)
    if not name.startswith("Autoencoder") or not hasattr(kind, "decode"):
        raise UsageError(f"`autoencoder` {source} is not an autoencoder of diffusers, but of the class {name}")
    how = {"subfolder": subfolder, "torch_dtype": torch.float32, "use_safetensors": True}
    try:
        if weights:
            module, found = kind.from_pretrained(source, output_loading_info=True, **how)
            if found["missing_keys"]:  # diffusers would draw them at random
                raise ValueError(f"its weights lack {found['missing_keys'][:1]}")
            return module.eval().requires_grad_(False), config
        with torch.device("meta"):
            return kind.from_config(config).eval(), config
    except Exception as error:  # of any type: diffusers builds a module from files that anyone may have written
        raise UsageError(f"`autoencoder` {source} cannot be loaded ({first_line(error)}): download it again") from error


class _Block(nn.Module):
    """A residual block of two 3x3 convolutions; it starts as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        for each in self.second.parameters():
            nn.init.zeros_(each)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the convolutions add to it."""
        return x + self.second(F.silu(self.first(F.silu(x))))


class SmallNetwork(nn.Module):
    """Encoder and decoder, fully convolutional; most of the work is at a quarter and an eighth of the side."""

    def __init__(self) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        down = [nn.PixelUnshuffle(4), conv(48, 64), _Block(64), nn.PixelUnshuffle(2), nn.Conv2d(256, 128, 1)]
        self.encoder = nn.Sequential(*down, _Block(128), _Block(128), nn.SiLU(), conv(128, CHANNELS))
        up = [conv(CHANNELS, 128), _Block(128), _Block(128), nn.Conv2d(128, 256, 1), nn.PixelShuffle(2)]
        up += [_Block(64), _Block(64), _Block(64), nn.Conv2d(64, 96, 1), nn.PixelShuffle(2)]
        self.decoder = nn.Sequential(*up, _Block(24), nn.SiLU(), conv(24, 12), nn.PixelShuffle(2))

    def encode(self, pictures: Tensor) -> Tensor:
        """Return the latents, between -3 and 3."""
        return BOUND * torch.tanh(self.encoder(pictures) / BOUND)

    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1]."""
        return self.decoder(latents)


@register
class Small(Autoencoder):
    """The small autoencoder of the package, in float32.

    Args:
        fingerprint: the hash of the weights, if they must be the same as in training; None takes those of the package.

    Raises:
        UsageError: if the weights are others than in training, for example after an upgrade of the package. The
            description of a flow has the hash, so that loading the flow compares it.
    """

    name = "small"
    encodes_in_step = True
    pixels_at_once: ClassVar[Mapping[str, int]] = {"cuda": 2**23}  # about 1 GB of activations

    def __init__(self, fingerprint: str | None = None) -> None:
        self.fingerprint = _small_fingerprint()
        if fingerprint not in (None, self.fingerprint):
            raise UsageError("`autoencoder` small has other weights than in training: install the version used there")

    @override
    def encode(self, pictures: Tensor) -> tuple[Tensor, None]:
        return self._call("encode", pictures), None

    @override
    def decode(self, latents: Tensor) -> Tensor:
        return self._call("decode", latents)

    @override
    def prepare(self, device: torch.device) -> None:
        _small(device)

    @torch.no_grad()
    def _call(self, method: str, x: Tensor) -> Tensor:
        with in_float32(x):
            return getattr(_small(x.device), method)(x.float())


@cache
def _small(device: torch.device) -> SmallNetwork:
    """Return the network, shared by all flows of this process; on the meta device it has no weights."""
    with torch.device("meta"):
        network = SmallNetwork()
    if device.type != "meta":
        try:
            weights = {name: each.float() for name, each in load_file(WEIGHTS).items()}
            network.load_state_dict(weights, assign=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UsageError(f"{WEIGHTS} is damaged ({first_line(error)}): install this package again") from error
    return network.to(device).requires_grad_(False)


@cache
def _small_fingerprint() -> str:
    """Return a hash of the weights."""
    return blake2b(read_bytes(WEIGHTS), digest_size=16).hexdigest()
