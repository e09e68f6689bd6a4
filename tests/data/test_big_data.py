"""Tests of fifteen million images, simulated by files with holes, in eight processes at once."""

import json
import multiprocessing
import pickle
import time
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from rectified_flow.data import GlobalBatch
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import StreamSampler
from rectified_flow.system.artifact import find_damage, write_manifest
from tests.patience import PATIENCE

FORK = multiprocessing.get_context("fork")
LENGTH, SIDE, PROCESSES = 15_000_000, 2, 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big")
    with (path / "images.uint8").open("wb") as file:
        file.truncate(LENGTH * 3 * SIDE**2)
    np.lib.format.open_memmap(path / "labels.npy", mode="w+", dtype=np.int64, shape=(LENGTH,))
    info = {"content": "", "source": "holes", "length": LENGTH, "image_size": SIDE, "class_names": ["a", "b"]}
    (path / "info.json").write_text(json.dumps(info | {"rows": {"images.uint8": [3, SIDE, SIDE]}}))
    write_manifest(path, "image store", ("images.uint8", "labels.npy", "info.json"))
    return path


def anonymous_memory() -> int:
    """Return the share of this process in memory that no file backs [bytes]."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon"))


def open_and_read(path: Path, rank: int) -> tuple[ImageDataset, float]:
    """The dataset, and the processor time until its first image was there [s]."""
    began = time.process_time()
    assert find_damage(path, "image store") is None
    dataset = ImageDataset(path)
    assert len(dataset[0]) == 2
    opened = time.process_time() - began
    for indices in islice(StreamSampler(len(dataset), 0, GlobalBatch(4, PROCESSES), rank), 200):
        assert dataset.read_batch(indices)["images"].shape[0] == 4
    return dataset, opened


def measure(path: Path, small: Path, rank: int, together: Barrier, pipe: Connection) -> None:
    open_and_read(small, rank)  # what a forked process copies of its parent when it does this for the first time
    together.wait(PATIENCE)  # shares change when others come and go
    before = anonymous_memory()
    together.wait(PATIENCE)
    dataset, opened = open_and_read(path, rank)
    together.wait(PATIENCE)
    pipe.send((opened, anonymous_memory() - before, len(pickle.dumps(dataset))))
    together.wait(PATIENCE)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_it_opens_at_once_and_is_shared(store: Path, flowers: ImageDataset) -> None:
    ours, theirs = zip(*(FORK.Pipe(duplex=False) for _ in range(PROCESSES)), strict=True)
    together = FORK.Barrier(PROCESSES)
    processes = [
        FORK.Process(target=measure, args=(store, flowers.path, rank, together, theirs[rank]))
        for rank in range(PROCESSES)
    ]
    for process, pipe in zip(processes, theirs, strict=True):
        process.start()
        pipe.close()  # so that a process that dies ends the wait for it
    for process, pipe in zip(processes, ours, strict=True):
        opened, memory, pickled = pipe.recv()
        process.join()
        print(f"opened in {opened * 1000:.1f} ms, {memory / 2**20:.2f} MiB of its own, {pickled} bytes pickled")
        assert opened < 1
        assert memory < 4 * 2**20
        assert pickled < 2000
