"""The flags of the training programs, composed of those of their parts.

Imports no torch, see :mod:`rectified_flow.flags`.
"""

from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from rectified_flow.data.config import DataConfig
from rectified_flow.data.framing import parse_ratio
from rectified_flow.errors import require
from rectified_flow.evaluation.config import EvaluationConfig
from rectified_flow.flows.config import (
    CouplingConfig,
    MeanFlowConfig,
    RectifiedFlowConfig,
    ReflowConfig,
    TeacherConfig,
)
from rectified_flow.machine import require_memory
from rectified_flow.networks.config import UnetConfig
from rectified_flow.runs.config import TrainingConfig


@dataclass(frozen=True)
class ProgramConfig:
    """Flags that every program has."""

    given: ClassVar[frozenset[str]] = frozenset()
    """The names of the flags that a person or a file gave; the parser sets it."""

    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import", help_behavior_hint="(default: none)")] = ()
    """Python modules to import first, which register networks, flows or data spaces of your own."""
    interrupted_exit_code: int = 0
    """Exit code after a signal asked for the end; 143 where Kubernetes, Ray or a script shall start it again."""

    def __post_init__(self) -> None:
        code = self.interrupted_exit_code
        require(
            0 <= code <= 255 and code not in (1, 2),
            f"--interrupted_exit_code is {code}; it must be 0 or from 3 to 255, as 1 and 2 mean errors",
        )


@dataclass(frozen=True)
class TrainProgramConfig(ProgramConfig):
    """Flags that the training programs have."""

    config: Path | None = None
    """Start from the flags in this file, a run's config.json; flags on the command line override them."""
    dry_run: bool = False
    """Print all flags, the batch arithmetic, and the memory and time that a step takes, and exit."""
    look: bool = False
    """Open the pictures, print what they are, write some as they are trained on to OUTPUT_DIR/look.png, and exit."""


@dataclass(frozen=True)
class TrainRectifiedFlow:
    """All flags of train_oxford.py."""

    data: DataConfig = field(default_factory=DataConfig)
    network: UnetConfig = field(default_factory=UnetConfig)
    rectified_flow: RectifiedFlowConfig = field(default_factory=RectifiedFlowConfig)
    coupling: CouplingConfig = field(default_factory=CouplingConfig)
    reflow: ReflowConfig = field(default_factory=ReflowConfig)
    run: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    def __post_init__(self) -> None:
        if self.reflow.reflow_from is not None:
            check_taught("reflow_from", self.data, self.network, self.evaluation)
        check_parts(self.data, self.network, self.run, self.evaluation)
        self.rectified_flow.check_times(self.times)
        require(
            self.reflow.reflow_from is None or self.coupling.coupling == "independent",
            "--coupling and --reflow_from exclude each other: drawn pairs come with their noise",
        )

    @property
    def times(self) -> str:
        """The name of the time distribution."""
        reflows = self.reflow.reflow_from is not None
        return self.rectified_flow.time_distribution or ("u_shaped" if reflows else "logit_normal")


@dataclass(frozen=True)
class TrainMeanFlow:
    """All flags of train_mean_flow.py."""

    data: DataConfig = field(default_factory=DataConfig)
    network: UnetConfig = field(default_factory=UnetConfig)
    mean_flow: MeanFlowConfig = field(default_factory=MeanFlowConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    coupling: CouplingConfig = field(default_factory=CouplingConfig)
    run: TrainingConfig = field(default_factory=partial(TrainingConfig, lr_decay="cosine"))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    def __post_init__(self) -> None:
        if self.teacher.teacher is not None:
            check_taught("teacher", self.data, self.network, self.evaluation)
        check_parts(self.data, self.network, self.run, self.evaluation)
        guidance = self.mean_flow.guidance_scale, self.mean_flow.guidance_mixing
        if self.teacher.teacher is not None:
            self.mean_flow.check_teacher()
            require(
                self.coupling.coupling == "independent",
                "--coupling and --teacher exclude each other: paths come with their noise",
            )
        require(
            self.network.use_cfg or self.teacher.teacher is not None or guidance == (1, 0),
            "--guidance_scale and --guidance_mixing need labels: pass --use_cfg",
        )


def check_parts(data: DataConfig, network: UnetConfig, run: TrainingConfig, evaluation: EvaluationConfig) -> None:
    """Raise a UsageError if flags of these parts do not fit together."""
    if data.autoencoder is None:
        network.check_side(data.image_size, ratio=parse_ratio(data.aspect_ratio))
    check_folders(data, run)
    check_room(data, run)
    if data.dataset_path is None:  # else a recipe may hold some out
        check_held_out(data, evaluation)


def check_folders(data: DataConfig, run: TrainingConfig) -> None:
    """Raise a UsageError if a run would write into its own training pictures."""
    if data.dataset_path is None:
        return
    pictures = data.dataset_path.resolve()
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoints, "cache_dir": data.cache_dir}
    for flag, folder in written.items():
        require(
            folder is None or not folder.resolve().is_relative_to(pictures),
            f"--{flag} {folder} lies inside --dataset_path {data.dataset_path}, where the run's own files would become "
            "training pictures: choose a folder outside",
        )


def check_held_out(data: DataConfig, evaluation: EvaluationConfig, share: float = 0.05) -> None:
    """Raise a UsageError, which proposes a share, if the run is to stop by pictures that it does not hold out."""
    require(
        data.holdout > 0 or not evaluation.stop_when_memorising,
        f"--stop_when_memorising needs pictures to measure on: pass --holdout {share:g}",
    )


def check_taught(flag: str, data: DataConfig, network: UnetConfig, evaluation: EvaluationConfig) -> None:
    """Raise a UsageError if a flag is given that a run has no use for which learns from what a teacher draws."""
    given = {"augment": data.augment, "holdout": data.holdout, "init_from": network.init_from}
    given |= {"stop_when_memorising": evaluation.stop_when_memorising}
    for name, value in given.items():
        require(not value, f"--{name} has no effect with --{flag}, which draws what the run learns: leave it out")


def check_room(data: DataConfig, run: TrainingConfig) -> None:
    """Raise a UsageError if a batch of pictures, or those of a preview, cannot fit into memory."""
    picture = prod(data.framing.stored_shape)
    for name in ("batch_size", "num_samples"):
        count = getattr(run, name) or 1
        require_memory(
            count * picture,
            f"{count} picture{'s' * (count > 1)} of --image_size {data.framing.size_text}",
            f"lower --image_size or --{name}",
        )
