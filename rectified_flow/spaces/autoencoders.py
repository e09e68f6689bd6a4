"""Autoencoders: between pictures and the latents that a flow works on. Frozen, and part of no checkpoint."""

import json
import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import torch
from einops import rearrange
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor, nn

from rectified_flow.errors import UsageError, first_line, require
from rectified_flow.registry import register


class Autoencoder(ABC):
    """Encodes pictures ``[b, 3, s, s]`` in [-1, 1], and decodes their latents ``[b, c, h, w]``, on any device.

    Both also work on torch's meta device, without weights.

    Register a subclass and keep its constructor's arguments as attributes, and checkpoints can name it.
    """

    name: str
    """For display."""
    fingerprint: str
    """Differs between autoencoders that encode differently."""

    @abstractmethod
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and standard deviation of the latents' distribution, float32; None where it is a single point."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures in about [-1, 1], float32."""

    def shape_of(self, image_size: int) -> tuple[int, ...]:
        """``(k, c, h, w)`` of what encodes a picture with that side [px]: a mean, and for ``k = 2`` a deviation.

        Found on torch's meta device, where nothing is computed.

        Raises:
            UsageError: if latents do not decode to the same side.
        """
        pictures = torch.zeros(1, 3, image_size, image_size, device="meta")
        nearest = 2 ** max(3, round(math.log2(image_size)))
        try:
            mean, std = self.encode(pictures)
            decoded = self.decode(mean).shape[-1]
        except RuntimeError as error:
            raise UsageError(
                f"--image_size {image_size} cannot be halved as often as --autoencoder {self.name} does: take a power "
                f"of two, such as {nearest}"
            ) from error
        require(
            decoded == image_size,
            f"--image_size {image_size} comes back from --autoencoder {self.name} as {decoded} px: take a power of "
            f"two, such as {nearest}",
        )
        return 1 if std is None else 2, *mean.shape[1:]

    def prepare(self, device: torch.device) -> None:  # noqa: B027, as most have nothing to load
        """Load the weights, if there are any, onto ``device``.

        Raises:
            UsageError: if they are not there.
        """


@register
class Haar(Autoencoder):
    """The Haar wavelet transform, orthonormal and exact: each level replaces 2x2 pixels by their mean and differences.

    Nothing is compressed or learned. At level 2, latents have 48 channels and a quarter of the side.

    Args:
        levels: how often the side is halved.
    """

    def __init__(self, levels: int = 2) -> None:
        self.levels = levels

    @property
    def name(self) -> str:  # type: ignore[override]
        return "haar"

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return f"haar {self.levels}"

    def encode(self, pictures: Tensor) -> tuple[Tensor, None]:
        x = pictures.float()
        for _ in range(self.levels):
            x = torch.einsum("ij,bcjhw->bcihw", _haar(x), rearrange(x, "b c (h p) (w q) -> b c (p q) h w", p=2, q=2))
            x = x.flatten(1, 2)
        return x, None

    def decode(self, latents: Tensor) -> Tensor:
        x = latents.float()
        for _ in range(self.levels):
            x = torch.einsum("ij,bcihw->bcjhw", _haar(x), x.unflatten(1, (-1, 4)))
            x = rearrange(x, "b c (p q) h w -> b c (h p) (w q)", p=2, q=2)
        return x


def _haar(x: Tensor) -> Tensor:
    """The orthonormal transform of 2x2 pixels ``[4, 4]``: mean, horizontal, vertical and diagonal difference."""
    return x.new_tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2


CONFIG_FILE, VAE_FOLDER = "config.json", "vae"


@register
class PretrainedAutoencoder(Autoencoder):
    """An autoencoder class of diffusers, such as ``AutoencoderKL``, in float32. One of videos encodes single frames.

    Args:
        source: a folder or hub id, of the autoencoder or of a pipeline that has one.
        fingerprint: of the weights, if they must be these; that of the weights that are there if not given.
    """

    def __init__(self, source: str, fingerprint: str | None = None) -> None:
        self.source, self._expected = str(source), fingerprint

    @classmethod
    def at(cls, name: str, fingerprint: str | None = None) -> Self:
        """That of a folder, which may be relative to the current one, or of a hub id."""
        folder = Path(name).expanduser()
        return cls(str(folder.resolve()) if folder.is_dir() else name, fingerprint)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.source

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self._expected or _fingerprint_of(self.source)

    @cached_property
    def _blank(self) -> nn.Module:
        """The architecture without weights."""
        kind, config, _ = _find(self.source)
        with torch.device("meta"):
            return kind.from_config(config).eval()

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        with _float32(pictures):
            return _encode(self._module(pictures.device), pictures.float())

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        with _float32(latents):
            return _decode(self._module(latents.device), latents.float())

    def prepare(self, device: torch.device) -> None:
        self._module(device)

    def _module(self, device: torch.device) -> nn.Module:
        if device.type == "meta":
            return self._blank
        require(
            self._expected in (None, _fingerprint_of(self.source)),
            f"--autoencoder {self.source} has other weights than the flow was trained with: name the autoencoder of "
            "its training",
        )
        return _load(self.source).to(device)


def _float32(x: Tensor) -> AbstractContextManager[None]:
    """No lower precision inside the block; the meta device has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _encode(module: nn.Module, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
    frames = _takes_frames(module)
    encoded: Any = module.encode(pictures[:, :, None] if frames else pictures)  # type: ignore[operator]
    distribution = getattr(encoded, "latent_dist", None)
    mean, std = (encoded[0], None) if distribution is None else (distribution.mode(), distribution.std)
    return (mean[:, :, 0], None if std is None else std[:, :, 0]) if frames else (mean, std)


def _decode(module: nn.Module, latents: Tensor) -> Tensor:
    frames = _takes_frames(module)
    decoded: Tensor = module.decode(latents[:, :, None] if frames else latents).sample  # type: ignore[operator]
    return decoded[:, :, 0] if frames else decoded


def _takes_frames(module: nn.Module) -> bool:
    return any(isinstance(each, nn.Conv3d) for each in module.modules())


@cache
def _load(source: str) -> nn.Module:
    """The module with its weights, shared by all flows of this process."""
    kind, _, folder = _find(source)
    try:
        module: nn.Module = kind.from_pretrained(
            source, subfolder=folder, torch_dtype=torch.float32, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--autoencoder {source} cannot be loaded ({first_line(error)})") from error
    return module.eval().requires_grad_(False)


@cache
def _fingerprint_of(source: str) -> str:
    """Hash of the class, its settings and its weights."""
    kind, config, _ = _find(source)
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    digest = blake2b(repr((kind.__name__, sorted(settings.items()))).encode(), digest_size=16)
    for name, weights in sorted(_load(source).state_dict().items()):
        digest.update(name.encode())
        digest.update(weights.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@cache
def _find(source: str) -> tuple[Any, dict[str, Any], str | None]:
    """The class, its settings, and the subfolder where they are.

    Raises:
        UsageError: if there is no autoencoder of diffusers.
    """
    reasons = []
    for folder in (None, VAE_FOLDER):
        try:
            config = dict(json.loads(_fetch(source, folder).read_text()))
        except (OSError, ValueError, TypeError, HfHubHTTPError) as error:
            reasons.append(first_line(error))
            if isinstance(error, LocalEntryNotFoundError):  # the hub cannot be reached
                break
            continue
        if folder is None and not config.keys() & {"_class_name", "architectures"}:
            continue
        return _class(source, config), config, folder
    reason = reasons[0] if reasons else "its config.json names no class"
    raise UsageError(
        f"--autoencoder {source} cannot be found ({reason}): pass haar, or the folder or hub id of an autoencoder "
        "of diffusers"
    )


def _class(source: str, config: Any) -> Any:
    try:
        import diffusers  # takes seconds
    except ModuleNotFoundError as error:
        raise UsageError(f"--autoencoder {source} needs diffusers: pip install diffusers") from error

    name = config.get("_class_name") or next(iter(config.get("architectures") or ["model of another library"]))
    kind = getattr(diffusers, str(name), None)
    if not (str(name).startswith("Autoencoder") and isinstance(kind, type) and hasattr(kind, "decode")):
        raise UsageError(
            f"--autoencoder {source} is a {name}, not an autoencoder of diffusers: pass one, such as an AutoencoderKL"
        )
    return kind


def _fetch(source: str, folder: str | None) -> Path:
    """The settings file; of a hub id, downloaded."""
    if Path(source).is_dir():
        return Path(source, folder or "", CONFIG_FILE)
    if Path(source).is_absolute() or source.startswith((".", "~")):
        raise FileNotFoundError("no such folder")
    return Path(hf_hub_download(source, CONFIG_FILE, subfolder=folder))


def open_autoencoder(name: str) -> Autoencoder:
    """The autoencoder that ``--autoencoder`` names: ``haar``, a folder or a hub id."""
    return Haar() if name == "haar" else PretrainedAutoencoder.at(name)
