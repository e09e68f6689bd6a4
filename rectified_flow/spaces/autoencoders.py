"""Autoencoders: between pictures and the latents that a flow works on. Frozen, and part of no checkpoint."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import torch
from einops import rearrange
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor, nn

from rectified_flow.errors import UsageError, first_line, require
from rectified_flow.registry import register
from rectified_flow.system.files import open_regular, read_document, reading


class Autoencoder(ABC):
    """A map from pictures ``[b, 3, s, s]`` in [-1, 1] to latents ``[b, c, h, w]`` and back, on any device.

    Both directions also work on torch's meta device, without weights. Register a subclass and keep its constructor's
    arguments as attributes, and checkpoints can name it.
    """

    name: str
    """The name in reports."""
    fingerprint: str
    """A hash that differs between autoencoders that encode differently."""

    @abstractmethod
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and standard deviation of the latents' distribution, float32; None where it is a single point."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1], float32."""

    def shape_of(self, image_size: int) -> tuple[int, ...]:
        """Return the shape ``(k, c, h, w)`` of an encoded picture: a mean, and for ``k = 2`` a standard deviation.

        The shape is found on torch's meta device, where nothing is computed.

        Args:
            image_size: side of the picture [px].

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
            UsageError: if they are missing.
        """


@register
class Haar(Autoencoder):
    """The Haar wavelet transform, orthonormal and exact: each level replaces 2x2 pixels by their mean and differences.

    Nothing is compressed or learned. At level 2, latents have 48 channels and a quarter of the side.

    Args:
        levels: number of times that the side is halved.
    """

    def __init__(self, levels: int = 2) -> None:
        self.levels = levels

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name in reports."""
        return "haar"

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """The hash of the settings and weights."""
        return f"haar {self.levels}"

    def encode(self, pictures: Tensor) -> tuple[Tensor, None]:
        """Return the mean of the latents, and their standard deviation or None."""
        x = pictures.float()
        for _ in range(self.levels):
            x = torch.einsum("ij,bcjhw->bcihw", _haar(x), rearrange(x, "b c (h p) (w q) -> b c (p q) h w", p=2, q=2))
            x = x.flatten(1, 2)
        return x, None

    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1], float32."""
        x = latents.float()
        for _ in range(self.levels):
            x = torch.einsum("ij,bcihw->bcjhw", _haar(x), x.unflatten(1, (-1, 4)))
            x = rearrange(x, "b c (p q) h w -> b c (h p) (w q)", p=2, q=2)
        return x


def _haar(x: Tensor) -> Tensor:
    """Return the transform of 2x2 pixels ``[4, 4]``: mean, and horizontal, vertical and diagonal difference."""
    return x.new_tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2


CONFIG_FILE, VAE_FOLDER = "config.json", "vae"
WEIGHTS = "diffusion_pytorch_model"
MOST_LAYERS, MOST_CHANNELS = 256, 2**16
"""Bounds on the numbers and lists of a ``config.json``: larger ones would take minutes to build."""


@register
class PretrainedAutoencoder(Autoencoder):
    """An autoencoder class of diffusers, such as ``AutoencoderKL``, in float32. Those of videos encode single frames.

    Args:
        source: a folder or hub id, of the autoencoder or of a pipeline that has one.
        fingerprint: the hash of the weights, if they must be the same as in training; None takes any.
    """

    def __init__(self, source: str, fingerprint: str | None = None) -> None:
        self.source, self._expected = str(source), fingerprint

    @classmethod
    def at(cls, name: str, fingerprint: str | None = None) -> Self:
        """Return the autoencoder of a folder, whose path may be relative to the current folder, or of a hub id."""
        folder = Path(name).expanduser()
        return cls(str(folder.resolve()) if folder.is_dir() else name, fingerprint)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name in reports."""
        return self.source

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """The hash of the settings and weights."""
        return self._expected or _fingerprint_of(self.source)

    @cached_property
    def _blank(self) -> nn.Module:
        """The architecture without weights."""
        kind, config, _ = _find(self.source)
        try:
            with torch.device("meta"):
                return kind.from_config(config).eval()
        except Exception as error:  # of any type: the settings may be of another version, or damaged
            raise UsageError(
                f"--autoencoder {self.source} cannot be built from its {CONFIG_FILE} ({first_line(error)})"
            ) from error

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mean of the latents, and their standard deviation or None."""
        with _float32(pictures):
            return _encode(self._module(pictures.device), pictures.float())

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return pictures in about [-1, 1], float32."""
        with _float32(latents):
            return _decode(self._module(latents.device), latents.float())

    def prepare(self, device: torch.device) -> None:
        """Load the weights onto ``device``."""
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
    """Return a context without lower precision, which the meta device does not have."""
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
    """Return the module with its weights, shared by all flows of this process."""
    kind, _, folder = _find(source)
    place = _with_weights(source, folder)
    try:
        loaded: tuple[nn.Module, dict[str, Any]] = kind.from_pretrained(
            place, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # of any type: settings and weights may not fit each other
        raise UsageError(f"--autoencoder {source} cannot be loaded ({first_line(error)})") from error
    module, found = loaded
    missing = [*found["missing_keys"], *(name for name, value in module.state_dict().items() if value.is_meta)]
    require(not missing, f"--autoencoder {source} cannot be loaded (its weights lack {missing[:1]}): download it again")
    return module.eval().requires_grad_(False)


def _with_weights(source: str, folder: str) -> Path:
    """Return the local folder of the weights, downloaded for a hub id.

    Raises:
        UsageError: if there are none, or an index names a file that is not safetensors, which diffusers would unpickle.
    """
    index, whole = f"{WEIGHTS}.safetensors.index.json", f"{WEIGHTS}.safetensors"
    if Path(source).is_dir():
        place = Path(source, folder)
    else:
        wanted = [f"{folder}/{name}".lstrip("/") for name in (CONFIG_FILE, index, whole, f"{WEIGHTS}-*.safetensors")]
        try:
            place = Path(snapshot_download(source, allow_patterns=wanted), folder)
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise UsageError(f"--autoencoder {source} cannot be downloaded ({first_line(error)})") from error
    files = [whole]
    if (place / index).exists():
        files = [
            str(each) for each in read_document(place / index, dict[str, dict[str, Any]]).get("weight_map", {}).values()
        ]
    for name in sorted(set(files)):
        require(
            name.endswith(".safetensors") and Path(name).name == name,
            f"--autoencoder {source} cannot be loaded ({index} names {name}): download it again",
        )
        try:
            with reading(place / name):
                open_regular(place / name).close()
        except UsageError as error:
            raise UsageError(f"--autoencoder {source} cannot be loaded ({error})") from error
    return place


@cache
def _fingerprint_of(source: str) -> str:
    """Return a hash of the class, its settings and its weights."""
    kind, config, _ = _find(source)
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    digest = blake2b(repr((kind.__name__, sorted(settings.items()))).encode(), digest_size=16)
    for name, weights in sorted(_load(source).state_dict().items()):
        digest.update(name.encode())
        digest.update(weights.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@cache
def _find(source: str) -> tuple[Any, dict[str, Any], str]:
    """Return the class, its settings, and the subfolder where they are.

    Raises:
        UsageError: if there is no autoencoder of diffusers, or its settings are out of bounds.
    """
    reasons = []
    for folder in ("", VAE_FOLDER):
        try:
            config = read_document(_fetch(source, folder), dict[str, Any])
        except (OSError, ValueError, HfHubHTTPError) as error:
            reasons.append(first_line(error))
            if isinstance(error, LocalEntryNotFoundError):  # the hub cannot be reached
                break
            continue
        if not folder and not config.keys() & {"_class_name", "architectures"}:
            continue
        kind = _class(source, config)
        for name, number in _numbers(config):
            most = MOST_LAYERS if "layers" in name or "blocks" in name else MOST_CHANNELS
            require(number <= most, f"--autoencoder {source} has {name} {number:g} in its {CONFIG_FILE}, above {most}")
        return kind, config, folder
    reason = reasons[0] if reasons else "its config.json names no class"
    raise UsageError(
        f"--autoencoder {source} cannot be found ({reason}): pass haar, or the folder or hub id of an autoencoder "
        "of diffusers"
    )


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a config, and the lengths of its lists, with the names of their keys."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, str(key))
    elif isinstance(value, list):
        yield f"layers of {name}", len(value)
        for each in value:
            yield from _numbers(each, name)


def _class(source: str, config: Mapping[str, Any]) -> Any:
    try:
        import diffusers  # takes seconds
    except ModuleNotFoundError as error:
        raise UsageError(f"--autoencoder {source} needs diffusers: pip install diffusers") from error

    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else "model of another library"
    name = str(config.get("_class_name") or named)
    kind = getattr(diffusers, name, None)
    if not (name.startswith("Autoencoder") and isinstance(kind, type) and hasattr(kind, "decode")):
        raise UsageError(
            f"--autoencoder {source} is a {name}, not an autoencoder of diffusers: pass one, such as an AutoencoderKL"
        )
    return kind


def _fetch(source: str, folder: str) -> Path:
    """Return the settings file, downloaded for a hub id."""
    if Path(source).is_dir():
        return Path(source, folder, CONFIG_FILE)
    if Path(source).is_absolute() or source.startswith((".", "~")):
        raise FileNotFoundError("no such folder")
    return Path(hf_hub_download(source, CONFIG_FILE, subfolder=folder or None))


def open_autoencoder(name: str) -> Autoencoder:
    """Return the autoencoder that ``--autoencoder`` names: ``haar``, or that of a folder or a hub id."""
    return Haar() if name == "haar" else PretrainedAutoencoder.at(name)
