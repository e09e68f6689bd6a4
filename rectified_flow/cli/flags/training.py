"""The flags of the training programs, and the checks that concern several groups."""

import re
from dataclasses import dataclass, field, fields
from math import prod
from os.path import realpath
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from annotated_types import Interval

from rectified_flow.cli.flags.data import ColumnConfig, DataConfig, SourceConfig
from rectified_flow.cli.flags.model import (
    FlowConfig,
    MeanFlowConfig,
    NetworkConfig,
    RectifiedFlowConfig,
    ReflowConfig,
    TeacherConfig,
    TeacherData,
)
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import (
    AtLeastTwo,
    Flags,
    Natural,
    default_is,
    plain,
    refuse,
)
from rectified_flow.runs.config import LrDecay, TrainingConfig
from rectified_flow.system.machine import require_memory

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Units of --budget."""


@dataclass(frozen=True)
class EvaluationConfig(Flags):
    """Evaluation during training."""

    evaluate_every: Natural = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps; the best checkpoint is kept. 0 disables them."""
    evaluation_samples: AtLeastTwo = 2000
    """Number of samples for each evaluation."""
    feature_network: FeatureNetwork = "inception"
    """Features for comparing pictures: inception (FID and KID), or efficientnet_lite0 (no download)."""
    stop_when_memorising: bool = False
    """Stop when the loss on --holdout pictures rises; `best` has the lowest held-out loss."""


@dataclass(frozen=True)
class ProgramConfig(Flags):
    """Flags that every program has."""

    given: ClassVar[frozenset[str] | None] = None
    """Names of the flags that were given on the command line or in a file, which the parser sets; else None."""

    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import", help_behavior_hint="(default: none)")] = ()
    """Python modules to import first, which register networks, flows, datasets or other parts of your own."""
    interrupted_exit_code: Annotated[int, Interval(ge=0, le=255)] = 0
    """Exit code after a signal asked for the end; 143 makes Kubernetes or Ray restart it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        code = self.interrupted_exit_code
        if code in (1, 2):
            raise UsageError(f"--interrupted_exit_code is {code}, the exit code of an error; choose 0, or 3 to 255")


def seconds_of(budget: str, flag: str = "budget") -> float:
    """Return the seconds of a time such as ``90s``, ``30m``, ``2h`` or ``1d``.

    Args:
        budget: the time.
        flag: the flag that has it, for the error.

    Raises:
        UsageError: if it is no such time, or 0.
    """
    number, unit = budget[:-1], SECONDS.get(budget[-1:])
    seconds = float(number) * unit if unit and re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", number) else 0.0
    if seconds <= 0:
        raise UsageError(f"--{flag} is {budget}; it must be a time such as 90s, 30m, 2h or 1d")
    return seconds


@dataclass(frozen=True)
class TrainProgramConfig(ProgramConfig):
    """Flags that the training programs have."""

    one_step: ClassVar[bool] = False
    """Whether a one-step generator learns from the run, which then has half of the budget."""

    config: Path | None = None
    """Start from the flags in this file, a run's config.json; flags on the command line override them."""
    budget: Annotated[str | None, default_is("1h with --dataset_path or a teacher, if no flag gives the length")] = None
    """Time to train, such as 90s, 30m, 2h or 1d; network, length and learning rate are chosen for it."""
    extend: str | None = None
    """Time by which to continue a run that has reached its last step."""
    dry_run: bool = False
    """Check the flags, print the plan of the run with its time and memory, and exit."""
    verbose: bool = False
    """Print all flags with --dry_run, too."""
    look: bool = False
    """Open and describe the pictures, write some as the network sees them to OUTPUT_DIR/look.png, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("budget", "extend"):
            seconds_of(getattr(self, name) or "1s", name)


@dataclass(frozen=True)
class RectifiedFlowProgramConfig(TrainProgramConfig):
    """Flags that the training program of a rectified flow has."""

    one_step: bool = False  # type: ignore[misc]  # a flag of this program alone
    """Then distil the run to a one-step generator in OUTPUT_DIR/one-step; each gets half of the budget."""


def check_folders(run: TrainingConfig, data: Path | None, cache_dir: Path | None, flag: str = "dataset_path") -> None:
    """Raise a UsageError if a run would write into the folder ``data`` of its training data, which ``flag`` names."""
    if data is None:
        return
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoints, "cache_dir": cache_dir}
    for name, folder in written.items():
        if folder is not None and Path(realpath(folder)).is_relative_to(realpath(data)):
            raise UsageError(f"--{name} {folder} lies inside --{flag} {data}: choose a folder outside")


@dataclass(frozen=True)
class TrainConfig:
    """The flags that both training programs have, in the order of ``--help``."""

    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    flow: Any = field(default_factory=FlowConfig)
    teacher: Any = field(default_factory=TeacherConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    columns: ColumnConfig = field(default_factory=ColumnConfig)
    run: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    def __post_init__(self) -> None:
        taught = self.teacher_data
        if taught is not None:
            unused = {
                "augment": self.data.augment,
                "holdout": self.data.holdout,
                "init_from": self.network.init_from,
                "stop_when_memorising": self.evaluation.stop_when_memorising,
                "coupling": self.flow.coupling != "independent",
            }
            refuse(unused, f"has no effect with --{taught.flag}, which generates the training data and their noise")
        source = self.source
        degrades = {"degrade": source.degrade is not None}
        if self.data.autoencoder is not None:
            refuse(degrades, "excludes --autoencoder: latents cannot be degraded; leave one out")
        if source.is_given and self.flow.coupling != "independent":
            pairs = self.flow.coupling == "ot" and source.as_start and source.source_path and not source.paired
            needed = "needs noise, or ot an unpaired --source_path as the start"
            refuse({"coupling": not pairs}, f"{self.flow.coupling} has no effect here: it {needed}; leave it out")
        for flag, folder in {"dataset_path": self.data.dataset_path, "source_path": source.source_path}.items():
            check_folders(self.run, folder, self.data.cache_dir, flag)
        if self.data.dataset_path is None:  # else the recipe may hold some out
            self.check_held_out()
        picture = prod(self.data.framing.stored_shape)
        for name in ("batch_size", "num_samples"):
            count = getattr(self.run, name) or 1
            pictures = f"{count} picture{'s' * (count > 1)} of --image_size {self.data.framing.size_text}"
            require_memory(count * picture, pictures, f"lower --image_size or --{name}")

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that the user set: if the config was built in Python, those that are not the defaults."""
        if self.program.given is not None:
            return self.program.given
        defaults = plain(type(self)())
        return frozenset(name for name, value in plain(self).items() if value != defaults[name])

    @property
    def teacher_data(self) -> TeacherData | None:
        """The data that a teacher is to generate; None without a teacher."""
        return None

    def check_held_out(self, share: float = 0.05) -> None:
        """Raise a UsageError, which proposes a share, if the run is to stop by pictures that it does not hold out."""
        if self.data.holdout <= 0 and self.evaluation.stop_when_memorising:
            raise UsageError(f"--stop_when_memorising needs pictures to measure on: pass --holdout {share:g}")


@dataclass(frozen=True)
class TrainRectifiedFlow(TrainConfig):
    """All flags of train_oxford.py."""

    flow: RectifiedFlowConfig = field(default_factory=RectifiedFlowConfig)
    teacher: ReflowConfig = field(default_factory=ReflowConfig)
    program: RectifiedFlowProgramConfig = field(default_factory=RectifiedFlowProgramConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.program.one_step:
            other = {"flow": self.flow.flow is not None, "prediction": self.flow.prediction != "velocity"}
            refuse(other, "excludes --one_step, which distils a rectified flow that predicts the velocity")

    @property
    def teacher_data(self) -> TeacherData | None:
        """The pairs of ``--reflow_from``."""
        flags = self.teacher
        if flags.reflow_from is None:
            return None
        folder = flags.pairs_dir or self.run.output_dir / "pairs"
        count, steps = flags.reflow_pairs or 50_000, flags.reflow_steps or 16
        return TeacherData("reflow_from", flags.reflow_from, "pairs", count, folder, steps)


@dataclass(frozen=True)
class MeanFlowTraining(TrainingConfig):
    """A training run with the defaults of a mean flow."""

    lr_decay: LrDecay = "cosine"


@dataclass(frozen=True)
class TrainMeanFlow(TrainConfig):
    """All flags of train_one_step.py and train_mean_flow.py."""

    flow: MeanFlowConfig = field(default_factory=MeanFlowConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    run: TrainingConfig = field(default_factory=MeanFlowTraining)

    def __post_init__(self) -> None:
        super().__post_init__()
        flow = self.flow
        if self.teacher.teacher is None:
            needy = {"method": flow.method in ("distill", "reflow")}
            refuse(needy, f"{flow.method} needs --teacher: pass the run of a rectified flow")
            guided = {"guidance_scale": flow.guidance_scale != 1, "guidance_mixing": flow.guidance_mixing > 0}
            conditional = self.network.use_cfg or self.columns.condition_on != ()
            conditional = conditional or (self.source.is_given and not self.source.as_start)
            refuse({} if conditional else guided, "needs conditions: pass --use_cfg or --condition_on")
            return
        of_pictures = {"method": flow.method == "mean_flow"}
        refuse(of_pictures, "mean_flow learns from pictures: pass --init_from instead of --teacher")
        if flow.method == "reflow":
            refuse(
                {"config": self.program.config is not None},
                "excludes --method reflow: pass the flags from the file on the command line",
            )
            return
        changed = {each.name: getattr(flow, each.name) != each.default for each in fields(flow)}
        for name in ("method", "flow", "flow_options", "weight_power", "weight_epsilon", "guidance_scale"):
            del changed[name]
        refuse(changed, "has no effect with --teacher, whose paths are learned by regression: leave it out")

    @property
    def teacher_data(self) -> TeacherData | None:
        """The paths of ``--teacher``, sampled with ``ab2``, the most accurate solver with few network calls."""
        flags = self.teacher
        if flags.teacher is None:
            return None
        folder = flags.paths_dir or self.run.output_dir / "paths"
        count, steps = flags.teacher_paths or 5_000, flags.teacher_steps or 8
        guidance: dict[str, Any] = {
            "guidance_scale": self.flow.guidance_scale,
            "autoguidance": 1.0 if flags.autoguidance is None else flags.autoguidance,
        }
        return TeacherData("teacher", flags.teacher, "paths", count, folder, steps, solver="ab2", **guidance)
