"""Check that this machine can train: versions, devices, data, processes, disk. Each line is ok, or names a fix."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow.cli.data import data_of, flags_of_files
from rectified_flow.cli.training_flags import ColumnConfig, DataConfig, SourceConfig, TrainConfig
from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.store_writer import default_cache_dir
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flags import flag_of, with_values
from rectified_flow.system.files import check_folder, usable_path
from rectified_flow.system.terminal import shown, spelling_arguments

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "ema-pytorch", "einops", "wandb", "safetensors", "tyro")
TEXT_PACKAGES = ("tokenizers", "transformers")
FREE_BYTES_WANTED = 5 * 10**9


@dataclass(frozen=True)
class Flags:
    """The flags of this program."""

    dataset: str = OXFORD_FLOWERS
    """Hub id of a dataset with an image column, or synthetic-flowers."""
    dataset_path: Path | None = None
    """Folder of your own images, or a local datasets folder."""
    image_size: int = 64
    """Side of the images [px]."""
    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")] = ()
    """Text files of examples/text, which are checked in place of the images."""
    output_dir: Path = Path("runs")
    """Folder in which runs will be saved."""
    cache_dir: Path | None = None
    """Folder for decoded images (default: $RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow)."""


class ProblemError(Exception):
    """A failed check; the message states the problem and the fix."""


def main(flags: Flags) -> int:
    """Run every check and return the number of failed checks."""
    checks: dict[str, Callable[[], str]] = {
        "versions": check_versions,
        "devices": check_devices,
        "data": lambda: check_text(flags) if flags.text else check_data(flags),
        "start method": check_start_method,
        "two processes": check_two_processes,
        "disk": lambda: check_disk(output_dir=flags.output_dir, cache_dir=flags.cache_dir or default_cache_dir()),
    }
    problems = 0
    for name, check in checks.items():
        try:
            verdict, text = "ok  ", check()
        except (ProblemError, UsageError) as problem:
            verdict, text = "FIX ", str(problem)
        except Exception as error:  # of any library; the other checks may name its cause
            verdict, text = "FIX ", f"{type(error).__name__}: {first_line(error)}"
        problems += verdict == "FIX "
        with spelling_arguments(lambda argument: f"--{flag_of(TrainConfig, argument) or argument}"):
            print(f"{verdict}  {name:14} {shown(text)}", flush=True)
    print("all checks passed" if problems == 0 else f"{problems} of {len(checks)} checks failed; see FIX above")
    return problems


def check_versions() -> str:
    """Return the versions of Python and of the main packages."""
    return f"python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def check_devices() -> str:
    """Return the GPUs with their memory, or the number of cores."""
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{each.name} {each.total_memory / 2**30:.0f} GiB" for each in properties)
    if shutil.which("nvidia-smi"):
        raise ProblemError(
            f"an NVIDIA driver is installed but torch {torch.__version__} finds no GPU: check CUDA_VISIBLE_DEVICES, "
            "and that the driver is recent enough for this version of torch"
        )
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    threads = torch.get_num_threads()
    return f"no GPU; {os.cpu_count()} CPU cores, {threads} threads: suitable for small images and debugging"


def check_data(flags: Flags) -> str:
    """Return the size of the dataset, after reading one batch from its store, and what was left out of it."""
    data = DataConfig(
        dataset=(flags.dataset,),
        dataset_path=flags.dataset_path,
        image_size=flags.image_size,
        cache_dir=flags.cache_dir,
    )
    data = with_values(data, flags_of_files(data))  # measurements, if most files are
    dataset: Any = data_of(data, SourceConfig(), ColumnConfig()).open()
    images = dataset.read_batch(range(min(8, len(dataset))))["images"]
    size = f"{len(dataset)} images, {len(dataset.class_names)} classes"
    batch = f"a batch {tuple(images.shape)} {images.dtype}, mean {images.float().mean():.0f}"
    return "; ".join((size, batch, f"stored in {dataset.path}", *dataset.notes))


def check_text(flags: Flags) -> str:
    """Return the number of lines of a text and its first line, after building its index."""
    for package in TEXT_PACKAGES:
        try:
            version(package)
        except PackageNotFoundError as error:
            raise ProblemError(f"the Python package {package} is not installed: pip install -e '.[text]'") from error
    sys.path.append(str(ROOT / "examples/text"))
    from line_store import open_lines
    from token_lines import HELD_OUT_EVERY

    lines, least = open_lines(flags.text, cache_dir=flags.cache_dir), 2 * HELD_OUT_EVERY
    if len(lines) < least:
        raise ProblemError(f"--text has {len(lines)} lines, too few for a held-out set: pass at least {least}")
    return f"{len(lines):,} lines, the first is {lines[0][:40]!r}; index in {lines.folder}"


def check_start_method() -> str:
    """Return the start method of data loader processes."""
    return f"{mp.get_start_method()} (of {', '.join(mp.get_all_start_methods())})"


def check_two_processes() -> str:
    """Sum a number over two processes, on two GPUs if available."""
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(  # type: ignore[attr-defined]
                _all_reduce, args=(f"{folder}/store", backend), nprocs=2
            )
        except Exception as error:
            raise ProblemError(
                f"an all-reduce over two processes with {backend} failed ({str(error).strip().splitlines()[-1]}): "
                f"check that {socket.gethostname()} resolves, or set GLOO_SOCKET_IFNAME=lo"
            ) from error
    return f"an all-reduce over two processes works ({backend})"


def _all_reduce(rank: int, store: str, backend: str) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    value = torch.tensor(float(rank + 1), device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(value)
    if value.item() != 3:
        raise RuntimeError(f"1 + 2 came back as {value.item()}")
    dist.destroy_process_group()


def check_disk(**folders: Path) -> str:
    """Return the free space in the folders for runs and decoded images, by their flags."""
    lines = []
    for name, path in folders.items():
        folder = check_folder(name, usable_path(f"`{name}`", path))
        place = folder.resolve()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < FREE_BYTES_WANTED:
            raise ProblemError(
                f"only {free / 1e9:.1f} GB are free for {folder}: free some space, as a run keeps several checkpoints"
            )
        lines.append(f"{free / 1e9:.0f} GB free for {folder}")
    return ", ".join(lines)


if __name__ == "__main__":
    sys.exit(min(1, main(tyro.cli(Flags, description=__doc__, use_underscores=True))))
