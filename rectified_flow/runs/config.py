"""The flags of a training run, whatever it trains; the :class:`Trainer` takes these and uses every one."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from rectified_flow.data.stream import GlobalBatch
from rectified_flow.errors import require, require_finite, require_fraction, require_natural, require_positive
from rectified_flow.flags import check_paths, default_is
from rectified_flow.system.files import usable_path
from rectified_flow.system.machine import require_memory

MixedPrecision = Literal["no", "bf16", "fp16"]
Tracker = Literal["none", "tensorboard", "wandb"]
LrDecay = Literal["none", "cosine", "rsqrt"]
DEFAULT_BATCH_SIZE = 64
DEFAULT_TRAIN_NUM_STEPS = 100_000
CHECKPOINTS = "checkpoints"
BYTES_PER_WORKER = 10_000_000
"""Of a loader process, at least."""
SHORTEST_EMA, LONGEST_EMA = 0.02, 0.28
"""Lengths that --power_ema can give: a shorter one amplifies rounding, and equal weights on all steps have 0.289."""


@dataclass(frozen=True)
class TrainingConfig:
    """A training run.

    Raises:
        UsageError: where a value makes no sense, or two exclude each other.
    """

    batch_size: Annotated[int | None, default_is("64, or as --global_batch_size implies")] = None
    """Items per process and micro-batch."""
    global_batch_size: int | None = None
    """Items per optimizer step over all processes and accumulation, instead of --batch_size."""
    gradient_accumulation_steps: Annotated[int | None, default_is("1, or as the two batch sizes imply")] = None
    """Micro-batches per optimizer step."""
    train_num_steps: Annotated[int | None, default_is("100000")] = None
    """Optimizer steps; excludes --num_epochs."""
    num_epochs: float | None = None
    """Passes over the dataset; excludes --train_num_steps."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = 500
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay: LrDecay = "none"
    """Decay after the warm-up: cosine towards 0 at the end of the run, or rsqrt, with the square root of the steps."""
    adam_betas: tuple[float, float] = (0.9, 0.99)
    """Decay of AdamW's averages of the gradient and of its square."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    max_bad_steps: int = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite; then the run stops."""
    mixed_precision: Annotated[
        MixedPrecision | None, default_is("that of the launcher, else bf16 on a GPU made for it, else no")
    ] = None
    """Precision of the forward pass."""
    use_ema: bool = True
    """Keep an exponential moving average of the weights, in float32, for sampling."""
    ema_decay: float = 0.9999
    """Decay of the EMA per optimizer step; early in a run it is lower."""
    power_ema: bool = False
    """Store snapshots for evaluate.py --ema_lengths with each checkpoint: 8 bytes a weight, never pruned."""
    seed: int = 0
    """Every random draw of the run is a function of the seed, whatever the number of processes."""
    compile: bool = False
    """Compile the loss with torch.compile: slow to start, then faster."""
    output_dir: Path = Path("runs/rectified-flow")
    """Where the run writes its config, metrics, plot and samples."""
    checkpoint_dir: Annotated[Path | None, default_is("OUTPUT_DIR/checkpoints")] = None
    """Where checkpoints go."""
    resume: str = "auto"
    """auto resumes from the newest checkpoint if there is one; never; or the PATH of a checkpoint or run."""
    save_every: int = 1000
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never pruned; 0 prunes all but the newest."""
    sample_every: int = 1000
    """Steps between sample grids; 0 draws one at the end only."""
    num_samples: int = 64
    """Images in a sample grid; 0 draws none."""
    sample_steps: Annotated[int | None, default_is("16 for a rectified flow, 1 for a mean flow")] = None
    """Intervals from noise to image in a sample grid."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    log_with: Tracker = "none"
    """Also log to TensorBoard or Weights & Biases (WANDB_MODE=offline works without an account)."""
    rank_timeout: float = 300.0
    """Seconds a process waits for the others, once the first step is done, before it fails."""
    num_workers: int = 0
    """Loader processes per rank; 0 is fastest for decoded images, which are read straight from the memory map."""
    multiprocessing_context: Annotated[
        Literal["fork", "spawn", "forkserver"] | None, default_is("that of the platform")
    ] = None
    """How loader processes start."""
    persistent_workers: bool = False
    """Keep loader processes from one pass to the next."""
    pin_memory: bool = False
    """Hand batches over in page-locked memory."""

    def __post_init__(self) -> None:
        for name in ("output_dir", "checkpoint_dir"):  # a library user may give a string
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        check_paths(self)
        if self.resume not in ("auto", "never"):
            object.__setattr__(self, "resume", str(usable_path("--resume", Path(self.resume))))
        require_finite(self)
        require_positive(self, "batch_size", "global_batch_size", "gradient_accumulation_steps", "train_num_steps")
        require_positive(
            self, "num_epochs", "learning_rate", "sample_steps", "log_every", "max_bad_steps", "rank_timeout"
        )
        require_natural(self, "num_workers", "lr_warmup_steps", "weight_decay", "max_grad_norm", "save_every", "seed")
        require_natural(self, "keep_checkpoints", "sample_every", "num_samples", "keep_every")
        require_fraction(self, "ema_decay")
        require(
            all(0 <= beta < 1 for beta in self.adam_betas),
            f"--adam_betas are {self.adam_betas[0]:g} {self.adam_betas[1]:g}; both must be at least 0 and below 1",
        )
        require_room_for_steps("sample_steps", self.sample_steps or 1)
        require_memory(self.num_workers * BYTES_PER_WORKER, f"--num_workers {self.num_workers}", "start fewer")
        require(self.seed < 2**32, f"--seed is {self.seed}; it must be below 2**32")
        require(
            self.lr_decay != "rsqrt" or self.lr_warmup_steps > 0,
            "--lr_decay rsqrt needs --lr_warmup_steps above 0, from where it decays",
        )
        require(
            self.train_num_steps is None or self.num_epochs is None,
            "--train_num_steps and --num_epochs exclude each other; give one",
        )
        require(
            self.num_workers > 0 or not (self.persistent_workers or self.multiprocessing_context),
            "--persistent_workers and --multiprocessing_context need --num_workers above 0",
        )

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.checkpoint_dir or self.output_dir / CHECKPOINTS

    def split_batch(self, world_size: int) -> GlobalBatch:
        """Cut the global batch over processes and accumulation.

        Raises:
            UsageError: if the numbers do not divide.
        """
        if self.global_batch_size is None:
            per_process = self.batch_size or DEFAULT_BATCH_SIZE
            return GlobalBatch(per_process, world_size, self.gradient_accumulation_steps or 1)
        total = self.global_batch_size
        if self.batch_size is not None and self.gradient_accumulation_steps is None:
            accumulation = max(1, total // (self.batch_size * world_size))
        else:
            accumulation = self.gradient_accumulation_steps or 1
        batch = GlobalBatch(self.batch_size or total // (world_size * accumulation), world_size, accumulation)
        require(
            batch.total == total,
            f"--global_batch_size {total} does not divide into {batch.per_process or 'images'} per process x "
            f"{world_size} process{'es' * (world_size > 1)} x {accumulation} accumulation",
        )
        return batch

    def total_steps(self, batch: GlobalBatch, dataset_length: int, step: int = 0, images_seen: int = 0) -> int:
        """Optimizer steps of the whole run; with ``num_epochs``, after ``step`` steps on perhaps other batch sizes."""
        if self.num_epochs is not None:
            return step + max(0, ceil((self.num_epochs * dataset_length - images_seen) / batch.total))
        return self.train_num_steps or DEFAULT_TRAIN_NUM_STEPS


def require_room_for_steps(name: str, steps: int) -> None:
    """Raise a UsageError if the grid of times of this flag, a float64 for each step, cannot fit into memory."""
    require_memory(8 * steps, f"--{name} {steps}", "take fewer")
