"""Loading speed of decoded images, and the memory that the processes need for them.

The baseline for speed is rectified-flow-pytorch, which decodes every image in every epoch. The baseline for memory is a
list of the images that `datasets` decodes. Needs Linux, and `pip install -e ".[benchmark]"`.
"""

import itertools
import math
import multiprocessing
import multiprocessing.synchronize
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from training_speed import write_photographs
from turns import PEER, Row, Turns, ratio, take_turns

from rectified_flow.data import GlobalBatch
from rectified_flow.data.open import open_dataset
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.data.stream import Batches, StreamSampler

FLOWERS = 8189
"""Number of images in Oxford Flowers."""


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    image_size: int = 64
    """Side of the images [px]."""
    batch_size: int = 64
    """Images per batch."""
    pictures: int = 256
    """Number of JPEG files."""
    ranks: int = 8
    """Number of processes that share the decoded images."""
    rounds: int = 5
    """Number of timed rounds per loader."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""


def load_ours(flags: Flags, folder: Path, turns: Turns) -> None:
    """Load batches like this project's Trainer."""
    pictures = open_dataset("", folder / "photographs", image_size=flags.image_size, cache_dir=folder)
    sampler = StreamSampler(len(pictures), 0, GlobalBatch(flags.batch_size), 0, 0)
    batches = iter(DataLoader(Batches(pictures), batch_sampler=sampler, collate_fn=dict))
    while True:
        images = sum(len(batch["images"]) for batch in itertools.islice(batches, 500))
        turns.done(images)


def load_peer(flags: Flags, folder: Path, turns: Turns) -> None:
    """Load batches like the peer's Trainer."""
    from rectified_flow_pytorch import ImageDataset as PeerDataset

    pictures = PeerDataset(folder / "photographs", image_size=flags.image_size)
    loader = DataLoader(pictures, batch_size=flags.batch_size, shuffle=True, drop_last=True)
    while True:
        for batch in loader:
            turns.done(len(batch))


def private_memory() -> int:
    """Memory of this process that no other process shares [bytes] (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def hold_store(store: Path, meet: multiprocessing.synchronize.Barrier) -> int:
    """Read the whole store while other processes do, and return the private memory that this adds [bytes]."""
    before = private_memory()
    pictures = ImageDataset(store)
    for start in range(0, len(pictures), 64):
        pictures.read_batch(range(start, min(start + 64, len(pictures))))
    meet.wait()  # else the pages of the last process to read would count as private
    added = private_memory() - before
    meet.wait()
    return added


def hold_list(folder: Path) -> int:
    """Keep the decoded images in a list, like many training scripts, and return the private memory it adds [bytes]."""
    from datasets import load_dataset

    pictures = load_dataset("imagefolder", data_dir=str(folder), split="train", cache_dir=str(folder.parent / "hub"))
    before = private_memory()
    held = list(pictures)
    return (private_memory() - before) if held else 0


def measure_loading(flags: Flags, folder: Path) -> Row:
    """Images per second of both loaders, each in one process."""
    times = take_turns(
        {"ours": partial(load_ours, flags, folder), PEER: partial(load_peer, flags, folder)},
        rounds=flags.rounds,
        minutes=flags.minutes,
    )
    speeds = f"{1 / times['ours'].median:,.0f} (uint8) and {1 / times[PEER].median:,.0f} (float32) images/s"
    what = f"image loading, {flags.image_size} px, one process"
    return Row(what, f"{PEER}, JPEG files of 667x500", ">= 500", str(ratio(times[PEER], times["ours"])), speeds)


def measure_memory(flags: Flags, folder: Path) -> Row:
    """Measure the memory of all ranks together, for as many images as Oxford Flowers has."""
    store = open_store(SyntheticFlowers(flags.image_size, count=FLOWERS), flags.image_size, cache_dir=folder)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager, spawn.Pool(flags.ranks) as pool:
        meet = manager.Barrier(flags.ranks, timeout=300)
        ours = sum(pool.starmap(hold_store, [(store, meet)] * flags.ranks, chunksize=1))
        (one,) = pool.map(hold_list, [folder / "photographs"])
    theirs = one / flags.pictures * FLOWERS * flags.ranks
    what = f"private memory of {flags.ranks} processes, {FLOWERS} images"
    shared = sum(file.stat().st_size for file in store.iterdir())
    sizes = f"{ours / 1e6:.1f} MB (plus {shared / 1e6:.0f} MB shared, {flags.image_size} px) and "
    sizes += f"{theirs / 1e9:.0f} GB (667x500, extrapolated from one process with {flags.pictures} images)"
    return Row(what, "list(load_dataset(...)) in each process", "< 1%", f"{ours / theirs:.3%}", sizes)


def measure_rows(flags: Flags) -> list[Row]:
    """Return the rows on speed and on memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photographs").mkdir()
        write_photographs(folder / "photographs", flags.pictures)
        return [measure_loading(flags, folder), measure_memory(flags, folder)]
