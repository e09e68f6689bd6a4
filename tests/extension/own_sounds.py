"""A kind of data of one's own: sounds in WAV files, which are trained on and generated as spectrograms."""

import wave
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rectified_flow import DataFacts, Medium, Space, UsageError, register
from rectified_flow.data.framing import Framing
from rectified_flow.data.sources import Fitted, PictureRows
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.listing import is_image
from rectified_flow.registry import describe

DECADES = 4
"""Decades of magnitude from silence to full scale."""
ITERATIONS = 32
"""Iterations of Griffin and Lim's search for phases that suit the magnitudes of all frames."""
Sound = tuple[int, Tensor]
"""Samples in a second, and the samples ``[n]``."""


def read_sound(file: Path) -> Sound:
    """Return the first channel of a WAV file of 16 bits."""
    with wave.open(str(file)) as content:
        if content.getsampwidth() != 2:
            raise ValueError(f"it has {8 * content.getsampwidth()} bits per sample; save 16")
        samples = np.frombuffer(content.readframes(content.getnframes()), "<i2")[:: content.getnchannels()]
        return content.getframerate(), torch.from_numpy(samples.astype(np.float32) / 32768)


class Sounds(Medium):
    """WAV files, whose pictures have low frequencies at the bottom, and full scale in white."""

    space: "Spectrograms"
    items = "sounds"
    suffix = ".wav"
    input_suffixes = (".wav",)

    def render(self, data: Tensor) -> Tensor:
        grey = (self.space.encode(data) + 1) * 127.5
        return grey.clamp(0, 255).to(torch.uint8).flip(2).expand(-1, 3, -1, -1)

    def read(self, file: Path) -> Tensor:
        return self.space.spectrogram(read_sound(file))

    def write(self, content: Tensor) -> bytes:
        sound, target = self.space.sound(content).clamp(-1, 1) * 32767, BytesIO()
        with wave.open(target, "wb") as file:
            file.setparams((1, 2, self.space.rate, len(sound), "NONE", ""))
            file.writeframes(sound.numpy().astype("<i2").tobytes())
        return target.getvalue()


@register
class Spectrograms(Space):
    """Logarithms of magnitudes ``[b, 1, frequencies, frames]``, from -4 for silence to 0 for full scale.

    Args:
        shape: ``(1, frequencies, frames)``.
        rate: samples in a second.
    """

    def __init__(self, shape: Sequence[int], rate: int) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.rate = rate

    @classmethod
    def of(cls, facts: DataFacts, /) -> "Spectrograms":
        """Build the space of a run on a store or on a folder, whose space has the rate."""
        return cls((1, *facts.shape[1:]), cast(Spectrograms, facts.stored).rate)

    @property
    def medium(self) -> Sounds:
        return Sounds(self)

    def encode(self, data: Tensor) -> Tensor:
        return data.float() * 2 / DECADES + 1

    def decode(self, x: Tensor) -> Tensor:
        return (x - 1) * DECADES / 2

    def spectrogram(self, sound: Sound) -> Tensor:
        """Return the spectrogram ``[1, frequencies, frames]`` of the start of a sound, or of all and silence."""
        (rate, samples), (_, frequencies, frames) = sound, self.shape
        if rate != self.rate:
            raise ValueError(f"it has {rate} samples a second, not {self.rate}")
        missing = (frames - 1) * frequencies // 2 - len(samples)
        magnitudes = self._stft(pad(samples, (0, missing)))[:-1].abs() * 2 / frequencies  # 1 for full scale
        return magnitudes.log10().clamp(min=-DECADES)[None]

    def sound(self, datum: Tensor) -> Tensor:
        """Return the samples ``[n]`` of a sound whose spectrogram is about ``datum``."""
        magnitudes = pad(10 ** datum[0].float(), (0, 0, 0, 1)) * self.shape[1] / 2  # the highest frequency is 0
        phases = torch.rand(magnitudes.shape, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
        for _ in range(ITERATIONS):
            samples = torch.istft(torch.polar(magnitudes, phases), **self._frames)
            phases = self._stft(samples).angle()
        return samples

    def _stft(self, samples: Tensor) -> Tensor:
        return torch.stft(samples, return_complex=True, **self._frames)

    @property
    def _frames(self) -> dict[str, Any]:
        size = 2 * self.shape[1]
        return {"n_fft": size, "hop_length": size // 4, "window": torch.hann_window(size)}


class SoundRows(PictureRows):
    """Spectrograms with as many frequencies and frames as pictures would have rows and columns of pixels."""

    def __init__(self, framing: Framing, rate: int) -> None:
        super().__init__(framing)
        self.space = Spectrograms((1, *framing.stored_size[::-1]), rate)
        self.key = ("sounds", rate)

    def fit(self, image: Sound) -> Fitted:
        return Fitted(self.space.spectrogram(image).numpy(), self.framing.stored_size)

    def info(self, name: str, sizes: set[tuple[int, int]]) -> dict[str, Any]:
        return {"space": describe(self.space)}


@register(role="reader")
class SoundFolder(FileFolder):
    """All WAV files below a folder, whose subfolders are classes; see :class:`FileFolder`."""

    suffixes, other_suffixes, kind, space_name = (".wav",), (".flac", ".mp3"), "sounds", Spectrograms.__name__

    @classmethod
    def claim(cls, files: Sequence[Path]) -> tuple[bool, list[Path]]:
        """Return whether a folder has more sounds than pictures, and its sounds that are read as pictures: none."""
        return sum(file.suffix.lower() == ".wav" for file in files) > sum(map(is_image, files)), []

    @property
    def space(self) -> Spectrograms:
        return Spectrograms((1, 1, 1), read_sound(self.files[0])[0])

    def read(self, file: Path) -> Sound:
        return read_sound(file)

    def size_of(self, index: int) -> tuple[int, int]:
        raise UsageError("--image_size 0 is for pictures: pass the number of frequencies")

    def rows(self, framing: Framing) -> SoundRows:
        return SoundRows(framing, self.space.rate)
