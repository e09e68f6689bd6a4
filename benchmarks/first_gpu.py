"""The first run on a GPU: whether it computes the same as a CPU, resumes, waits for nothing, and how fast it is.

    python benchmarks/first_gpu.py                                        # on one GPU, in 7.5 minutes or less
    python benchmarks/first_gpu.py --only compiled-mean --minutes 12      # a check that was skipped for want of time
    python benchmarks/first_gpu.py --tiny                                 # on a CPU, in less than a minute

Each check prints one line. `pass` and `FAIL` judge a property, `figure` is a measurement, and `skip` names a check that
did not run. The exit code is 1 if a check failed.
"""

import contextlib
import gc
import io
import json
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torchvision.io import write_png

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import describe_machine, synchronized

from rectified_flow.cli import build
from rectified_flow.cli.data import build_space
from rectified_flow.cli.planning.limits import AUGMENT
from rectified_flow.cli.settings import Settings
from rectified_flow.cli.train import train as run_training
from rectified_flow.cli.training_flags import DataConfig, FlowConfig, NetworkConfig, OneStepConfig, TrainConfig
from rectified_flow.data.open import Pictures
from rectified_flow.data.stream import Batch
from rectified_flow.distributed import join_processes
from rectified_flow.flags import values_of
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.networks.network import to_device
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.checkpoint import load_tensors, resolve
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.training.trainer import Trainer

PROJECT = Path(__file__).resolve().parent.parent
Verdict = Literal["pass", "FAIL", "figure", "skip"]
Kind = Literal["rectified", "mean", "planned"]
Precision = Literal["float32", "tf32", "bf16"]
LossAndGradient = tuple[float, Tensor]

BOUNDS: Mapping[Precision, float] = {"float32": 1e-3, "tf32": 2e-2, "bf16": 0.1}
"""Largest relative difference of a loss or gradient from that in float32 on a CPU."""
LARGEST_CHANGE = 0.05
"""Relative difference of logged values between a run on one process and the same run on two."""
PICTURES = 100
"""More than the largest batch."""
STEPS = 20
"""Of the runs that are compared."""
PROGRAM_TIMEOUT = 240.0
"""Seconds until a launched program is killed."""


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    tiny: bool = False
    """Small networks and few steps; for a CPU."""
    minutes: float = 7.5
    """Time budget. A check that may take longer than what is left is skipped."""
    only: tuple[str, ...] = ()
    """Run these checks only."""


@dataclass(frozen=True)
class Size:
    """A network, its images and its batch."""

    image_size: int
    dim: int
    dim_mults: tuple[int, ...]
    batch_size: int


FULL, SMALL, TINY = Size(64, 64, (1, 2, 3, 4), 64), Size(32, 32, (1, 2), 32), Size(8, 8, (1, 2), 4)
PLANNED, TINY_PLANNED = Size(128, 48, (1, 2), 64), Size(32, 8, (1,), 4)
"""A network of the latents of augmented pictures, which a step encodes, as in a plan for few pictures."""


@dataclass(frozen=True)
class Result:
    """What a check prints."""

    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Check:
    """A check, and what it takes."""

    run: Callable[["Bench"], Result]
    seconds: float
    """That it may take on a GPU."""
    needs_gpu: bool = False


class Bench:
    """The device, the sizes of the checks, and a folder for runs and decoded images."""

    def __init__(self, tiny: bool, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        self.device = join_processes().device
        self.full, self.small, self.planned = (TINY, TINY, TINY_PLANNED) if tiny else (FULL, SMALL, PLANNED)
        self.timed_steps, self.warm_up = (2, 1) if tiny else (20, 5)

    @cached_property
    def undisturbed(self) -> Path:
        """A run of :data:`STEPS` steps in this process, with which others are compared."""
        return train(self, "undisturbed", STEPS)

    def data(self, size: Size) -> Pictures:
        """Return the description of the pictures, which are noise."""
        pictures = self.folder / f"pictures-{size.image_size}"
        if not pictures.exists():
            pictures.mkdir()
            shape, generator = (PICTURES, 3, size.image_size, size.image_size), torch.Generator().manual_seed(0)
            for index, each in enumerate(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)):
                write_png(each, str(pictures / f"{index:03d}.png"))
        return Pictures(dataset_path=pictures, image_size=size.image_size, cache_dir=self.folder / "cache")

    def trainer(self, kind: Kind, *, compiled: bool = False) -> Trainer:
        """Build a Trainer whose stepper is ready, in the default precision of this device."""
        size = self.planned if kind == "planned" else self.full
        run = TrainingConfig(
            batch_size=size.batch_size,
            compile=compiled,
            num_samples=4 if self.tiny else 64,
            output_dir=self.folder / "run",
            optimizer=("muon",) if kind == "planned" else TrainingConfig.optimizer,
        )
        with quiet():
            return Trainer(build_flow(kind, size), self.data(size).open(), run)


# The same numbers as on a CPU


def compare_with_cpu(bench: Bench, kind: Kind, precision: Precision) -> Result:
    """Loss and gradient of the same draws, with those of the CPU in float32."""
    flow = fill_zeros(build_flow(kind, bench.full)).eval()
    batch = draw_batch(8, bench.full.image_size)
    expected = loss_and_gradient(flow, batch)
    bf16 = precision == "bf16"
    to_device(flow, bench.device, "bf16" if bf16 else "no")
    with convolutions_in_tf32(precision != "float32"):
        found = loss_and_gradient(flow, [each.to(bench.device) for each in batch], bf16=bf16)
    return compare(found, expected, BOUNDS[precision])


def compare_pictures(bench: Bench) -> Result:
    """Pictures of the same numbers: their noise is drawn on the CPU for every device."""
    flow = fill_zeros(build_flow("rectified", bench.full))
    [(_, expected)] = sample_batches(flow, range(4), steps=4)
    to_device(flow, bench.device, "no")
    [(_, found)] = sample_batches(flow, range(4), steps=4)
    largest = int((found.cpu().int() - expected.int()).abs().max())
    return judge(largest <= 4, f"values differ by up to {largest} of 255, as to the CPU (bound 4)")


# The same run, however it goes


def repeat(bench: Bench) -> Result:
    """Train the same run twice. A failure means that the device's operations are not deterministic."""
    return compare_checkpoints(bench.undisturbed, train(bench, "again", STEPS))


def resume(bench: Bench) -> Result:
    """Stop a run halfway, and resume it from its checkpoint."""
    train(bench, "resumed", STEPS // 2)
    return compare_checkpoints(bench.undisturbed, train(bench, "resumed", STEPS))


def launch_with_torchrun(bench: Bench) -> Result:
    """One process of torchrun, with NCCL and DistributedDataParallel."""
    launcher = "-m torch.distributed.run --standalone --nproc_per_node 1 train_oxford.py"
    flags = ["--config", str(bench.undisturbed / "config.json"), "--output_dir", str(bench.folder / "torchrun")]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": PROJECT}
    command = [sys.executable, *launcher.split(), *flags]
    ended = subprocess.run(command, timeout=PROGRAM_TIMEOUT, check=False, **how)
    if ended.returncode != 0 or "Grad strides do not match" in ended.stdout:  # a warning of DDP: it copies gradients
        return Result("FAIL", f"exit code {ended.returncode}: {ended.stdout[-900:]}")
    return compare_logs(bench.undisturbed, bench.folder / "torchrun")


# Where the CPU waits


def find_waits(bench: Bench, kind: Kind) -> Result:
    """List the lines at which three steps wait for the GPU, as far as torch reports them."""
    take = stepping(bench.trainer(kind))
    take(bench.warm_up)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    places = sorted({f"{Path(each.filename).name}:{each.lineno}" for each in waits})
    return judge(not waits, f"{len(waits)} in three steps{': ' * bool(places)}{', '.join(places)}")


# Speed


def time_eager(bench: Bench, kind: Kind) -> Result:
    """Time steps without the compiler."""
    trainer = bench.trainer(kind)
    return Result("figure", describe_speed(bench, trainer, time_step(bench, trainer)))


def check_compiled(bench: Bench, kind: Kind) -> Result:
    """Loss and gradient of the compiled flow, with dropout, against those of the eager one; and its speed."""
    size, began = bench.full, time.perf_counter()
    trainer = bench.trainer(kind, compiled=not bench.tiny)
    flow = fill_zeros(trainer.flow)
    assert isinstance(flow, Flow)
    if bench.tiny:
        flow.compile(disable=True)  # tracing alone takes longer than all other checks; other tests compile
    batch = [each.to(bench.device) for each in draw_batch(size.batch_size, size.image_size)]
    bf16 = trainer.accelerator.mixed_precision == "bf16"
    expected = loss_and_gradient(flow, batch, bf16=bf16, loss=partial(type(flow).loss, flow))
    found = loss_and_gradient(flow, batch, bf16=bf16)
    compiling = time.perf_counter() - began
    result = compare(found, expected, BOUNDS["bf16" if bf16 else "float32"])
    speed = describe_speed(bench, trainer, time_step(bench, trainer))
    return replace(result, text=f"{result.text} from eager; compiled in {compiling:.0f} s; {speed}")


KINDS: tuple[Kind, ...] = ("rectified", "mean")
PLAN: Kind = "planned"
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
CHECKS: Mapping[str, Check] = {
    **{
        f"{kind}-{precision}": Check(partial(compare_with_cpu, kind=kind, precision=precision), 20)
        for kind in KINDS
        for precision in PRECISIONS
    },
    "pictures": Check(compare_pictures, 10),
    "repeat": Check(repeat, 40),
    "resume": Check(resume, 40),
    "torchrun": Check(launch_with_torchrun, 40, needs_gpu=True),  # for NCCL; tests/launch runs torchrun on a CPU
    **{f"waits-{kind}": Check(partial(find_waits, kind=kind), 30, needs_gpu=True) for kind in (*KINDS, PLAN)},
    **{f"eager-{kind}": Check(partial(time_eager, kind=kind), 20) for kind in (*KINDS, PLAN)},
    "compiled-rectified": Check(partial(check_compiled, kind="rectified"), 170),
    "compiled-mean": Check(partial(check_compiled, kind="mean"), 540),
}


# Flows and batches


def build_flow(kind: Kind, size: Size) -> Flow:
    """Build a flow on the CPU, with the weights of a seed."""
    torch.manual_seed(0)
    data, network = DataConfig(image_size=size.image_size), NetworkConfig(dim=size.dim, dim_mults=size.dim_mults)
    values = OneStepConfig(data, network) if kind == "mean" else TrainConfig(data, network)
    if kind == "planned":
        data, times = replace(data, autoencoder=("small",), augment=AUGMENT), ("stratified=True",)
        values = replace(values, data=data, flow=FlowConfig(time_distribution=times))
    return build.build_flow(values, {}, build_space(data))


def fill_zeros(flow: nn.Module) -> Any:
    """Give weights that start at zero other values: as they are, they hide all that comes before them."""
    torch.manual_seed(1)
    for parameter in flow.parameters():
        if parameter.requires_grad and not parameter.detach().any():
            nn.init.normal_(parameter, std=0.05)
    return flow


def draw_batch(count: int, side: int) -> list[Tensor]:
    """``x_0``, noise, ``t``, and ``r``, which is earlier in the first half of the rows."""
    generator = torch.Generator().manual_seed(2)
    x_0 = torch.rand(count, 3, side, side, generator=generator) * 2 - 1
    noise = torch.randn(count, 3, side, side, generator=generator)
    t = torch.rand(count, generator=generator) * 0.8 + 0.1
    return [x_0, noise, t, torch.where(torch.arange(count) < count // 2, 0.3 * t, t)]


def loss_and_gradient(
    flow: Flow, batch: Sequence[Tensor], *, bf16: bool = False, loss: Callable[..., Any] | None = None
) -> LossAndGradient:
    """Return the loss of the draws in ``batch`` and its gradient as one vector, by ``loss`` or the flow's own loss."""
    x_0, noise, t, r = batch
    flow.zero_grad()
    call, rows = loss or flow.loss, BatchRows(0, 0, len(t), slice(None))
    with deterministic(rows, t.device), torch.autocast(t.device.type, torch.bfloat16, enabled=bf16):
        value = call(x_0, noise, t, r, {}, len(t) // 2)[0] if isinstance(flow, MeanFlow) else call(x_0, noise, t, {})
        value.backward()
    gradients = [p.grad.float().cpu().flatten() for p in flow.parameters() if p.grad is not None]
    return value.item(), torch.cat(gradients)


def stepping(trainer: Trainer) -> Callable[[int], None]:
    """Return a function that takes a number of further steps."""
    batches: Iterator[Batch] = trainer._batches()

    def take(count: int) -> None:
        for _ in range(count):
            trainer.stepper.take(batches)

    return take


def time_step(bench: Bench, trainer: Trainer) -> float:
    """Seconds of a step."""
    take = stepping(trainer)
    take(bench.warm_up)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return synchronized(lambda: take(bench.timed_steps)) / bench.timed_steps


def describe_speed(bench: Bench, trainer: Trainer, seconds: float) -> str:
    """Time and throughput of a step, and the peak memory since :func:`time_step`."""
    parts = [f"{seconds * 1e3:.1f} ms a step", f"{trainer.batch.total / seconds:,.0f} images/s"]
    if bench.device.type == "cuda":
        parts.append(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return ", ".join(parts)


@contextlib.contextmanager
def convolutions_in_tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 convolutions of a GPU may round their inputs to TF32, as they do by default."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


# Runs


def train(bench: Bench, name: str, steps: int) -> Path:
    """Train to ``steps`` in this process, from the run's last checkpoint if there is one; returns the run's folder."""
    size = bench.small
    run = TrainingConfig(
        batch_size=size.batch_size,
        train_num_steps=steps,
        learning_rate=1e-3,
        lr_warmup_steps=5,
        log_every=5,
        num_samples=0,
        output_dir=bench.folder / name,
    )
    pictures, network = bench.data(size), NetworkConfig(dim=size.dim, dim_mults=size.dim_mults)
    data = DataConfig(dataset_path=pictures.dataset_path, image_size=size.image_size, cache_dir=pictures.cache_dir)
    with quiet():
        run_training(Settings(TrainConfig, {"given": values_of(TrainConfig(data, network, run=run))}))
    return run.output_dir


def compare_checkpoints(run: Path, other: Path) -> Result:
    """Weights, average and moments of the newest checkpoints of two runs."""
    path, other_path = resolve(run), resolve(other)
    largest = 0.0
    for file in sorted(each.name for each in path.glob("*.safetensors")):
        ours, theirs = load_tensors(path, file), load_tensors(other_path, file)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if not torch.equal(value, theirs[name]):
                change = (value.double() - theirs[name].double()).abs().max() / value.double().abs().max()
                largest = max(largest, float(change.nan_to_num(torch.inf)))
    what = f"weights, average and moments after {STEPS} steps"
    return judge(largest == 0, f"{what} {f'differ by {largest:.1e} of the largest' if largest else 'are byte-equal'}")


def compare_logs(run: Path, other: Path) -> Result:
    """Losses and gradient norms that two runs logged."""
    ours, theirs = (read_metrics(each) for each in (run, other))
    changes = [abs(b / a - 1) for a, b in zip(ours, theirs, strict=True)]
    text = f"losses and gradient norms of {STEPS} steps differ by up to {max(changes):.1e} from one process"
    return judge(all(each < LARGEST_CHANGE for each in changes), f"{text} (bound {LARGEST_CHANGE:g})")


def read_metrics(run: Path) -> list[float]:
    """Loss and gradient norm of each line of ``metrics.jsonl``."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("loss", "grad_norm")]


# Verdicts


def judge(good: bool, text: str) -> Result:
    """Return a verdict on a property."""
    return Result("pass" if good else "FAIL", text)


def compare(found: LossAndGradient, expected: LossAndGradient, bound: float) -> Result:
    """Judge the relative differences of a loss and its gradient; a difference that is not a number fails."""
    loss = found[0] / expected[0] - 1
    gradient = float((found[1] - expected[1]).norm() / expected[1].norm())
    return judge(abs(loss) < bound and gradient < bound, f"loss {loss:+.1e}, gradient {gradient:.1e} (bound {bound:g})")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print nothing inside the block."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def perform(check: Check, bench: Bench) -> Result:
    """Run a check. An error is a failure too, with its traceback on stderr."""
    gc.collect()  # trainers of earlier checks, before their memory is counted
    try:
        return check.run(bench)
    except Exception as error:
        traceback.print_exc()
        return Result("FAIL", f"{type(error).__name__}: {str(error)[-600:]}")


def main(flags: Flags) -> int:
    """Print a line for each check; returns the exit code."""
    unknown = set(flags.only) - set(CHECKS)
    if unknown:
        raise SystemExit(f"there is no check {', '.join(sorted(unknown))}, only {', '.join(CHECKS)}")
    print(f"{describe_machine()}; torch {torch.__version__}", flush=True)
    warnings.filterwarnings("ignore", category=FutureWarning)
    began, failed = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags.tiny, Path(folder))
        for name in flags.only or CHECKS:
            check, started = CHECKS[name], time.monotonic()
            left = 60 * flags.minutes - (started - began)
            if check.needs_gpu and bench.device.type != "cuda":
                result = Result("skip", "needs a GPU")
            elif left < (0 if flags.tiny else check.seconds):
                result = Result("skip", f"may take {check.seconds:g} s and {left:.0f} s are left: pass --only {name}")
            else:
                result = perform(check, bench)
            failed += [name] * (result.verdict == "FAIL")
            print(f"{result.verdict:6} {name:24} {result.text}  [{time.monotonic() - started:.0f} s]", flush=True)
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Flags, description=__doc__, use_underscores=True)))
