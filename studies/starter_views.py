"""Views of pictures of any size as a dataset, cut anew for each batch on the device of the training."""

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow.randomness import mix
from studies.starter_data import is_held_out

VIEW = 128
"""Side of the views [px]."""
GROUPS = 16
"""Groups of a batch; the views of a group are reduced by one factor."""
COARSEST = 0.6
"""Share of views that show as much of their picture as their factor allows."""
BORDER = 1.4
"""Largest side of a view of a picture with transparent parts, relative to the long side of the picture."""
WHITE, PLAIN = 0.45, 0.2
"""Shares of the grounds of transparent pictures that are white, and that have another colour. The other grounds are
views of pictures without transparent parts."""
Numbers = NDArray[np.int64]


class Views(Dataset[Any]):
    """Square views of the pictures of several sources, ``images`` as uint8 ``[b, 3, 128, 128]`` on ``device``.

    A picture is kept with its reductions to halves, as RGBA whose colours are multiplied by their opacity. A view is
    128 to 256 px of one of these, reduced to 128 px. Pictures are drawn at random, so that an index only seeds a draw.

    Args:
        folder: folder of the Parquet files.
        shares: share of the views of each source.
        device: where the pictures are kept.
        held_out: cut views of the pictures that are for figures only.

    Raises:
        FileNotFoundError: if a source is not stored.
        ValueError: if a source has no such picture.
    """

    varies = True

    def __init__(
        self, folder: Path, shares: Mapping[str, float], device: torch.device, *, held_out: bool = False
    ) -> None:
        self.shares, self.device = dict(shares), device
        levels, weights = list[list[Tensor]](), list[float]()
        with ThreadPoolExecutor() as pool:
            for name, share in shares.items():
                table = pq.read_table(folder / f"{name}.parquet", columns=["name", "image"]).to_pydict()
                chosen = [
                    image
                    for name, image in zip(table["name"], table["image"], strict=True)
                    if is_held_out(name) == held_out
                ]
                if not chosen:
                    raise ValueError(f"no picture of {name} is {'held out' if held_out else 'for training'}")
                levels += pool.map(reductions, chosen)
                weights += [share / len(chosen)] * len(chosen)
        self.weights = np.array(weights) / sum(weights)
        self.sides = np.array([[(*each.shape[:2],) for each in padded(picture)] for picture in levels])
        """Height and width of each reduction of each picture, ``[pictures, levels, 2]``."""
        sizes = self.sides.prod(axis=2) * (np.arange(self.sides.shape[1]) < [[len(each)] for each in levels])
        self.starts = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
        self.levels = np.array([len(each) for each in levels])
        self.transparent = np.array([bool((each[0][..., 3] < 255).any()) for each in levels])
        self.is_small = ~self.transparent & (self.sides[:, 0].min(axis=1) < 2 * VIEW)
        self.pixels = torch.cat([each.reshape(-1, 4) for picture in levels for each in picture]).to(device)
        """The pixels of all reductions of all pictures, uint8 ``[pixels, 4]``."""

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def fingerprint(self) -> str:
        """A hash of the sources and their sizes."""
        return f"{mix(str(self.shares), len(self), len(self.pixels)):016x}"

    def read_batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return a view for each number, all of them drawn by the first one."""
        rng = default_rng(mix("views", int(numbers[0])))
        rows = rng.choice(len(self), len(numbers), p=self.weights)
        rows = rows[np.argsort(~self.is_small[rows] + rng.random(len(rows)))]  # the first groups have the least side
        groups = np.array_split(rows, min(GROUPS, len(rows)))
        windows = [
            VIEW if 2 * index < len(groups) else int(rng.integers(VIEW, 2 * VIEW)) for index in range(len(groups))
        ]
        views = torch.cat([self.cut(some, window, rng) for some, window in zip(groups, windows, strict=True)])
        colours, opacity = views[:, :3], views[:, 3:] / 255
        return {"images": (colours + (1 - opacity) * self.grounds(rows, colours, rng)).round().clamp(0, 255).byte()}

    def cut(self, rows: Numbers, window: int, rng: Generator) -> Tensor:
        """Return views of ``window`` px of reductions of pictures, float ``[n, 4, 128, 128]`` from 0 to 255."""
        short, long = self.sides[rows].min(axis=2), self.sides[rows].max(axis=2)
        fits = np.where(self.transparent[rows, None], BORDER * long, short) >= window
        coarsest = (fits.sum(axis=1) - 1).clip(0, self.levels[rows] - 1)
        level = np.where(rng.random(len(rows)) < COARSEST, coarsest, rng.integers(0, coarsest + 1))
        free = self.sides[rows, level] - window
        corner = np.floor(rng.uniform(np.minimum(0, free), np.maximum(0, free) + 1)).astype(np.int64)
        step = rng.choice((1, -1), len(rows))  # half of the views are mirrored
        corner[:, 1] += np.where(step > 0, 0, window - 1)
        table = np.column_stack([corner, step, self.sides[rows, level], self.starts[rows, level]])
        y, x, steps, height, width, start = torch.from_numpy(table).to(self.device).T[:, :, None, None]
        along = torch.arange(window, device=self.device)
        y, x = y + along[:, None], x + steps * along
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = start + y.clamp(min=0).minimum(height - 1) * width + x.clamp(min=0).minimum(width - 1)
        found = (self.pixels[at] * inside[..., None]).permute(0, 3, 1, 2).float()
        return found if window == VIEW else F.interpolate(found, (VIEW, VIEW), mode="bicubic", antialias=True)

    def grounds(self, rows: Numbers, colours: Tensor, rng: Generator) -> Tensor:
        """Return what is behind each view: white, a colour, or the view of a picture without transparent parts."""
        count = len(rows)
        plain = np.where(rng.random((count, 1)) < WHITE / (WHITE + PLAIN), 255, rng.integers(0, 256, (count, 3)))
        grounds = torch.from_numpy(plain).float().to(self.device)[:, :, None, None]
        opaque = np.flatnonzero(~self.transparent[rows])
        if not len(opaque):
            return grounds
        others = torch.from_numpy(rng.choice(opaque, count)).to(self.device)
        is_plain = torch.from_numpy(rng.random((count, 1, 1, 1)) < WHITE + PLAIN).to(self.device)
        return torch.where(is_plain, grounds, colours[others])


def reductions(image: bytes) -> list[Tensor]:
    """Return a picture and its reductions to halves, uint8 ``[h, w, 4]``, down to a short side of 128 px."""
    rgba = torch.from_numpy(np.array(Image.open(io.BytesIO(image)).convert("RGBA"))).float()
    rgba[..., :3] *= rgba[..., 3:] / 255
    found = [rgba]
    while min(found[-1].shape[:2]) >= 2 * VIEW:
        found.append(F.avg_pool2d(found[-1].permute(2, 0, 1), 2).permute(1, 2, 0))
    return [each.round().byte() for each in found]


def padded(levels: list[Tensor], count: int = 8) -> list[Tensor]:
    """Return the levels of a picture, the last one repeated up to ``count``."""
    return levels + levels[-1:] * (count - len(levels))
