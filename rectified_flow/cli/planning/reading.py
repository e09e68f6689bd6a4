"""Measurements of the pictures of a run before they are read: their sides, the time of reading, and the round trip."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import log

import numpy as np
import torch
from accelerate import PartialState

from rectified_flow.cli.data import build_space
from rectified_flow.cli.training_flags import DataConfig
from rectified_flow.data.framing import Crop
from rectified_flow.data.sources import ImageSource, Row
from rectified_flow.data.store_writer import find_store
from rectified_flow.data.stream import spread
from rectified_flow.data.survey import survey
from rectified_flow.distributed import on_main
from rectified_flow.system.machine import processors
from rectified_flow.system.terminal import duration, line

TRIED = 16  # number of pictures that an autoencoder is tried on, and that are decoded to measure the time
GRID = 1.25  # if pictures are left out, the number that is read is about a power of this
READING_SHARE = 1 / 3  # of the time: if reading all pictures takes longer, some are left out


def sides_of(source: ImageSource, crop: Crop) -> list[int]:
    """Return the shorter sides of some pictures of a source [px], or the longer sides if crop is none. Collective."""

    def read() -> list[int]:
        sides = list[int]()
        for number in source.numbers(200):
            with suppress(Exception):  # a broken picture is reported when it is decoded
                sides.append((max if crop == "none" else min)(source.size_of(number)))
        return sides

    return on_main(PartialState(), read)


def round_trip_error(source: ImageSource, data: DataConfig) -> float:
    """Return how much the autoencoder of the flags changes some of the pictures of a source. Collective.

    Returns:
        The median of the root mean square errors of the pictures [levels of 256]; 0 if none can be read.
    """
    # Pictures for random crops have a margin, which is no part of what is encoded.
    data = replace(data, crop="center") if data.crop == "random" else data

    def measure() -> float:
        numbers = source.numbers(data.max_train_samples)
        some, rows = spread(numbers, TRIED), list[Row]()
        how = source.rows(replace(data.framing, resize=data.resize or survey(source, data.framing, some).resize))
        for number in some:
            with suppress(Exception):  # a broken picture is reported when it is decoded
                rows.append(how.fit(source.load(number)[0]).row)
        if not rows:
            return 0.0
        space, pictures = build_space(data), torch.from_numpy(np.stack(rows))
        space.medium.prepare(torch.device("cpu"))
        errors = space.decode(space.encode(space.medium.stored(pictures))) - pictures / 255
        return 255 * float(errors.square().flatten(1).mean(dim=1).sqrt().median())

    return on_main(PartialState(), measure)


def encoding_time(source: ImageSource, data: DataConfig) -> float:
    """Return the time to encode a picture of a source, and its mirror image, for the store [s]."""
    device = PartialState().device
    medium = build_space(data, source).medium
    medium.prepare(device)
    pictures = torch.zeros(TRIED // 2, *data.framing.shape, dtype=torch.uint8, device=device)
    medium.stored(pictures[:1]).cpu()  # the first call prepares the kernels
    began = time.monotonic()
    medium.stored(pictures).cpu()
    return (time.monotonic() - began) / len(pictures) * (1 + data.horizontal_flip)


def readable(source: ImageSource, data: DataConfig, seconds: float) -> dict[str, int]:
    """Return the number of pictures to read, as a flag, if all would take too much of the time. Collective.

    Args:
        source: the pictures.
        data: the flags of the pictures.
        seconds: the time of the run [s].
    """
    framing, numbers = data.framing, source.numbers(data.max_train_samples)

    def decoding_time() -> float:
        rows, some = source.rows(framing), spread(numbers, TRIED)

        def decode(number: int) -> None:
            with suppress(Exception):  # a broken picture is reported when all are decoded
                rows.fit(source.load(number)[0])

        began = time.monotonic()
        with ThreadPoolExecutor(processors()) as pool:
            [*pool.map(decode, some)]
        return (time.monotonic() - began) / len(some)

    def picture_time() -> float:
        stored = find_store(source, framing, data.cache_dir)
        if stored is None:
            return decoding_time() + encoding_time(source, data)
        is_encoded = build_space(data, source).medium.has_rows(stored, mirrored=data.horizontal_flip)
        return 0.0 if is_encoded else encoding_time(source, data)

    each, room = on_main(PartialState(), picture_time) if numbers else 0.0, READING_SHARE * seconds
    if each * len(numbers) <= room:
        return {}
    count = max(1, int(room / each))
    # Rounded down to a power of GRID, so that a restarted run mostly chooses the pictures that are already stored.
    count = int(GRID ** int(log(count, GRID)))
    whole = duration(each * len(numbers))
    text = f"{count:,} of {len(numbers):,}, as reading all takes {whole}; --max_train_samples overrides the choice"
    PartialState().print(line("pictures", text))
    return {"max_train_samples": count}
