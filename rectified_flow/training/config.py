"""The flags that all training runs have, frozen and validated."""

from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

from rectified_flow.checkpoint import CHECKPOINTS
from rectified_flow.data.oxford_flowers import OXFORD_FLOWERS
from rectified_flow.data.stream import GlobalBatch
from rectified_flow.errors import require, require_positive
from rectified_flow.evaluation.features import FeatureNetwork
from rectified_flow.flows.couplings import Coupling

MixedPrecision = Literal["no", "bf16", "fp16"]
Tracker = Literal["none", "tensorboard", "wandb"]
DEFAULT_BATCH_SIZE = 64
DEFAULT_TRAIN_NUM_STEPS = 100_000


@dataclass(frozen=True)
class DataFlags:
    dataset: str = OXFORD_FLOWERS
    """Hub id of a dataset with an image column, or synthetic-flowers, which needs no download."""
    dataset_path: Path | None = None
    """Folder of your own pictures (with a subfolder per class, or none), or a local datasets folder."""
    image_size: int = 64
    """Side of the images [px]; pictures are resized by their short side and cropped to the centre."""
    horizontal_flip: bool = True
    """Mirror half of the images."""
    skip_broken_images: bool = False
    """Leave out pictures that cannot be decoded, instead of stopping."""
    cache_dir: Path | None = None
    """Where decoded images are kept (default: $RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow)."""
    num_workers: int = 0
    """Loader processes per rank; 0 is fastest for decoded images, which are read straight from the memory map."""
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How loader processes start (default: the platform's way)."""
    persistent_workers: bool = False
    """Keep loader processes from one pass to the next."""
    pin_memory: bool = False
    """Hand batches over in page-locked memory."""


@dataclass(frozen=True)
class NetworkFlags:
    dim: int = 64
    """Channels of the Unet at full resolution."""
    dim_mults: tuple[int, ...] = (1, 2, 3, 4)
    """Channels of each level as multiples of dim; each level halves the side."""
    dropout: float = 0.1
    """Dropout probability inside residual blocks."""
    use_cfg: bool = False
    """Train on labels, dropping 10% of them, so that sampling can be guided (classifier-free guidance)."""


@dataclass(frozen=True)
class CouplingFlags:
    coupling: Coupling = "independent"
    """Which noise an image is trained with: any, the best match over the global batch (ot), or the nearest of some."""


@dataclass(frozen=True)
class OptimizationFlags:
    batch_size: int | None = None
    """Images per process and micro-batch (default: 64, or what --global_batch_size asks for)."""
    global_batch_size: int | None = None
    """Images per optimizer step over all processes and accumulation, instead of --batch_size."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step (default: 1, or what the two batch sizes ask for)."""
    train_num_steps: int | None = None
    """Optimizer steps (default: 100000); excludes --num_epochs."""
    num_epochs: float | None = None
    """Passes over the dataset; excludes --train_num_steps."""
    learning_rate: float = 3e-4
    """Peak learning rate of AdamW."""
    lr_warmup_steps: int = 500
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    max_bad_steps: int = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite; then the run stops."""
    mixed_precision: MixedPrecision | None = None
    """Precision of the forward pass (default: what the launcher says, else bf16 on a GPU made for it, else no)."""
    use_ema: bool = True
    """Keep an exponential moving average of the weights, in float32, for sampling."""
    ema_decay: float = 0.9999
    """Decay of the average per optimizer step; early in a run it is lower."""
    power_ema: bool = False
    """Keep what evaluate.py --ema_lengths makes other averages from: 8 bytes a weight of each checkpoint, for good."""
    seed: int = 0
    """Every random draw of the run is a function of this, whatever the number of processes."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    compile: bool = False
    """Compile the loss with torch.compile: slow to start, then faster."""


@dataclass(frozen=True)
class EvaluationFlags:
    evaluate_every: int = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps, whose best checkpoint is kept; 0 makes none."""
    evaluation_samples: int = 2000
    """Pictures drawn for each."""
    feature_network: FeatureNetwork = "inception"
    """What pictures are compared by: inception, for FID and KID, or efficientnet_lite0, which needs no download."""


@dataclass(frozen=True)
class OutputFlags:
    output_dir: Path = Path("runs/rectified-flow")
    """Where the run writes its config, metrics, plot and samples."""
    checkpoint_dir: Path | None = None
    """Where checkpoints go (default: OUTPUT_DIR/checkpoints)."""
    resume: str = "auto"
    """auto goes on from the newest checkpoint if there is one; never; or the PATH of a checkpoint or run."""
    save_every: int = 1000
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept for good; 0 keeps none beyond the newest."""
    sample_every: int = 1000
    """Steps between sample grids; 0 draws one at the end only."""
    num_samples: int = 64
    """Images in a sample grid; 0 draws none."""
    sample_steps: int | None = None
    """Intervals from noise to image in a sample grid (default: 16 for a rectified flow, 1 for a mean flow)."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    log_with: Tracker = "none"
    """Also log to TensorBoard or Weights & Biases (WANDB_MODE=offline works without an account)."""
    rank_timeout: float = 300.0
    """Seconds a process waits for the others, once the first step is done, before it gives the run up."""
    dry_run: bool = False
    """Print the resolved config, the batch arithmetic, and what a step takes of memory and time, and exit."""


@dataclass(frozen=True)
class TrainingConfig(EvaluationFlags, OutputFlags, OptimizationFlags, CouplingFlags, NetworkFlags, DataFlags):
    """A training run, whatever the flow.

    Raises:
        UsageError: where a value makes no sense, or two exclude each other.
    """

    def __post_init__(self) -> None:
        positive = "image_size dim batch_size global_batch_size gradient_accumulation_steps train_num_steps"
        positive += " num_epochs learning_rate sample_steps log_every max_bad_steps rank_timeout"
        for name in positive.split():
            require_positive(self, name)
        natural = "num_workers lr_warmup_steps weight_decay max_grad_norm save_every keep_checkpoints sample_every"
        natural += " num_samples seed keep_every evaluate_every"
        for name in natural.split():
            value = getattr(self, name)
            require(value >= 0, f"--{name} is {value}; it must not be below 0")
        for name in ("dropout", "ema_decay"):
            value = getattr(self, name)
            require(0 <= value < 1, f"--{name} is {value}; it must be at least 0 and below 1")
        require(
            self.evaluation_samples >= 2,
            f"--evaluation_samples is {self.evaluation_samples}; a distance needs at least 2",
        )
        require(
            len(self.dim_mults) > 0 and min(self.dim_mults) > 0,
            f"--dim_mults is {self.dim_mults}; it needs at least one number, all above 0",
        )
        require(self.seed < 2**32, f"--seed is {self.seed}; it must be below 2**32")
        divisor = 2 ** (len(self.dim_mults) - 1)
        require(
            self.image_size % divisor == 0,
            f"--image_size {self.image_size} is not divisible by {divisor}, as the {len(self.dim_mults)} levels of "
            f"--dim_mults need; take {max(1, round(self.image_size / divisor)) * divisor}",
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
    def bears_bf16(self) -> bool:
        """Whether the objective can be learned in bf16."""
        return True

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
        """Optimizer steps of the whole run; one counted in epochs may have made ``step`` of them with other batches."""
        if self.num_epochs is not None:
            return step + max(0, ceil((self.num_epochs * dataset_length - images_seen) / batch.total))
        return self.train_num_steps or DEFAULT_TRAIN_NUM_STEPS

    def plain(self) -> dict[str, Any]:
        """All flags as what JSON and trackers can hold."""
        return {
            name: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
