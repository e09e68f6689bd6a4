"""Any image autoencoder of diffusers, from a folder or the Hugging Face hub."""

import json
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor, nn

from rectified_flow.errors import UsageError, first_line, require
from rectified_flow.registry import register
from rectified_flow.spaces.autoencoder import Autoencoder, Haar

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
