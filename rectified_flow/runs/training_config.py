"""The flags of a training run, all used by :class:`rectified_flow.Trainer`."""

from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from rectified_flow.data import GlobalBatch
from rectified_flow.errors import UsageError
from rectified_flow.flags import (
    Flags,
    Fraction,
    Natural,
    NonNegative,
    Part,
    Positive,
    PositiveNumber,
    Seed,
    default_is,
    flag,
)

MixedPrecision = Literal["no", "bf16", "fp16"]
Tracker = Literal["none", "tensorboard", "trackio", "wandb"]
Resume = Literal["auto", "never"]
LrDecay = Literal["none", "cosine", "rsqrt"]
DEFAULT_BATCH_SIZE = 64
LARGEST_BATCH = 2**24
DEFAULT_TRAIN_NUM_STEPS = 100_000
BatchSize = Annotated[int, Interval(gt=0, le=LARGEST_BATCH)]
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class TrainingConfig(Flags):
    """A training run.

    Raises:
        UsageError: where a value makes no sense, or two exclude each other.
    """

    batch_size: Annotated[
        BatchSize | None, flag(choice="batch"), default_is("64, or as the global batch size implies")
    ] = None
    """Per-process micro-batch size."""
    global_batch_size: Annotated[BatchSize | None, flag(choice="batch")] = None
    """Items per optimizer step over all processes; gradients of several batches are accumulated to reach it."""
    gradient_accumulation_steps: Annotated[
        BatchSize | None, flag(choice="batch"), default_is("1, or as the two batch sizes imply")
    ] = None
    """Micro-batches of each process per optimizer step."""
    train_num_steps: Annotated[Positive | None, flag(choice="length"), default_is("100000")] = None
    """Optimizer steps, in place of a number of passes."""
    num_epochs: Annotated[PositiveNumber | None, flag(choice="length", excludes="train_num_steps")] = None
    """Passes over the dataset, in place of a number of steps."""
    optimizer: Annotated[Part, flag(choice="optimizer", shapes_training=True)] = ("adamw",)
    """adamw, muon, or a registered optimizer, and its arguments, such as betas=[0.9,0.99]."""
    learning_rate: Annotated[PositiveNumber, flag(choice="optimizer", shapes_training=True)] = 3e-4
    """Peak learning rate."""
    lr_warmup_steps: Annotated[Natural, flag(shapes_training=True)] = 500
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay: Annotated[LrDecay, flag(shapes_training=True)] = "none"
    """Decay after the warm-up: cosine to 0 at the end of the run, or rsqrt, the inverse square root of the steps."""
    max_grad_norm: Annotated[NonNegative, flag(shapes_training=True)] = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    mixed_precision: Annotated[
        MixedPrecision | None, default_is("the launcher's, else bf16 on a GPU that supports it, else no")
    ] = None
    """Precision of the forward pass."""
    ema_decay: Annotated[Fraction, flag(shapes_training=True)] = 0.9999
    """Decay per step of the float32 EMA of the weights for sampling, lower early in a run; 0 keeps no EMA."""
    seed: Seed = 0
    """Seed of every random draw; the result does not depend on the number of processes."""
    compile: Annotated[bool, flag(shapes_training=True)] = False
    """Compile the loss with torch.compile."""
    output_dir: Annotated[Path, flag(recorded=False)] = Path("runs/rectified-flow")
    """Folder for the config, metrics, plot, samples and checkpoints."""
    checkpoint_dir: Annotated[Path | None, flag(local=True), default_is("OUTPUT_DIR/checkpoints")] = None
    """Folder for the checkpoints, from which the run resumes."""
    resume: Annotated[Resume, flag(recorded=False)] = "auto"
    """auto: resume from the newest checkpoint, if any; never: refuse a folder that holds checkpoints."""
    resume_from_checkpoint: Annotated[str | None, flag(recorded=False, excludes="resume"), default_is("latest")] = None
    """Only latest: a run that is started again with its command resumes from its newest checkpoint anyway."""
    save_every: Natural = 1000
    """Steps between checkpoints; 0 saves only the last step."""
    keep_checkpoints: Natural = 3
    """Number of newest checkpoints to keep, in addition to the early one and the best one; 0 keeps all."""
    sample_every: Natural = 1000
    """Steps between sample grids; 0 draws only one at the end."""
    num_samples: Annotated[int, Interval(ge=0, le=2**20)] = 64
    """Images in a sample grid; 0 disables it."""
    sample_steps: Annotated[Positive | None, default_is("16 for a rectified flow, 1 for a mean flow")] = None
    """Intervals from noise to image in a sample grid."""
    log_every: Positive = 50
    """Steps between lines of metrics.jsonl."""
    log_with: Annotated[Tracker, flag(local=True)] = "none"
    """Also log to TensorBoard, Trackio (on this machine), or Weights & Biases (WANDB_MODE=offline needs no account)."""
    rank_timeout: Annotated[Annotated[float, Interval(gt=0, le=1e7)], flag(local=True)] = 300.0
    """Seconds to wait for other processes after the first step before failing."""
    num_workers: Annotated[Annotated[int, Interval(ge=0, le=1024)], flag(local=True)] = 0
    """Loader processes per rank; 0 is fastest for decoded images, which are read straight from the memory map."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_with == "trackio" and find_spec("trackio") is None:  # Accelerate would log nothing
            raise UsageError("`log_with` trackio needs the Python package trackio: pip install trackio")
        if self.resume_from_checkpoint not in (None, "latest"):
            other = f"`resume_from_checkpoint` is {self.resume_from_checkpoint}; it must be latest"
            remedy = "the same command resumes its run, and `init_from` PATH starts a new run from the weights at PATH"
            raise UsageError(f"{other}: {remedy}")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.checkpoint_dir or self.output_dir / CHECKPOINTS

    def split_batch(self, world_size: int) -> GlobalBatch:
        """Split the global batch over processes and accumulation.

        Raises:
            UsageError: if the numbers do not divide, or the batch is too large.
        """
        total, per_process, accumulation = self.global_batch_size, self.batch_size, self.gradient_accumulation_steps
        if total is None:
            batch = GlobalBatch(per_process or DEFAULT_BATCH_SIZE, world_size, accumulation or 1)
        else:
            per_process = per_process or max(1, total // (world_size * (accumulation or 1)))
            batch = GlobalBatch(per_process, world_size, accumulation or max(1, total // (per_process * world_size)))
        if batch.total > LARGEST_BATCH:
            remedy = "lower `batch_size` or `gradient_accumulation_steps`"
            raise UsageError(f"a step would train on {batch}, more than {LARGEST_BATCH} items: {remedy}")
        if total is not None and batch.total != total:
            raise UsageError(f"`global_batch_size` {total} cannot be split evenly: {batch}")
        return batch

    def total_steps(self, batch: GlobalBatch, dataset_length: int, step: int = 0, images_seen: int = 0) -> int:
        """Return the optimizer steps of the whole run, of which ``step`` steps saw ``images_seen`` items."""
        if self.num_epochs is not None:
            return step + max(0, ceil((self.num_epochs * dataset_length - images_seen) / batch.total))
        return self.train_num_steps or DEFAULT_TRAIN_NUM_STEPS
