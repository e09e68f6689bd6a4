"""The one place where pictures become numbers a flow works on, and back."""

from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.errors import RunError


def to_signed(images: Tensor) -> Tensor:
    """uint8 ``[b, c, h, w]`` to float32 in [-1, 1]; floating-point images are taken to be in [-1, 1] already."""
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    return images.float()


def to_unit(x: Tensor) -> Tensor:
    """A flow's ``x`` to float32 images in [0, 1], what lies outside clipped."""
    return x.float().add(1).div(2).clamp(0, 1)


def to_grid(images: Tensor, columns: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 ``[n, c, h, w]`` side by side in one picture ``[H, W, c]``, as near to a square as can be."""
    from torchvision.utils import make_grid  # takes seconds to load

    columns = columns or max(1, round(len(images) ** 0.5))
    grid: Tensor = make_grid(images, nrow=columns, padding=2, pad_value=255)
    return grid.permute(1, 2, 0).cpu().numpy()


def random_horizontal_flip(x: Tensor) -> Tensor:
    """Mirror each row of ``x`` ``[b, c, h, w]`` left to right with probability 1/2."""
    mirrored = randomness.rand("horizontal flip", (len(x), 1, 1, 1), x.device) < 0.5
    return torch.where(mirrored, x.flip(-1), x)


def write_picture(path: Path, pixels: np.ndarray[Any, Any], **options: Any) -> Path:
    """Write ``pixels`` ``[h, w, 3]``, whole or not at all, in the format of the suffix; return ``path``.

    Raises:
        RunError: if that fails.
    """
    content = BytesIO()
    Image.fromarray(pixels).save(content, format=path.suffix[1:], **options)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_bytes(content.getvalue())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise RunError(f"could not write {path} ({error}): make room, and the same command starts again") from error
    return path
