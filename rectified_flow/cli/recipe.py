"""Choice of flags from the time budget, the speed of the machine and the number of pictures.

Flags that the user sets are never changed. With a budget, the program measures how fast this machine trains networks of
several widths, chooses the widest network that the time is long enough for, and sets the number of steps. The chosen
flags are recorded, so a resumed run has the same ones.
docs/measurements/budget.md and docs/measurements/small_data.md have the measurements behind the settings.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, gcd, inf, log2
from typing import Any, Generic, TypeAlias, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from rectified_flow.cli.teacher import flags_of_checkpoint, recipe_of
from rectified_flow.cli.train_flags import (
    STARTER,
    STARTER_FOLDER,
    TeacherData,
    TrainConfig,
    TrainMeanFlow,
    TrainRectifiedFlow,
    seconds_of,
)
from rectified_flow.data.store import OriginalInfo
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, UsageError
from rectified_flow.flags import checked, command_line, plain, refuse, replaced
from rectified_flow.flows.solvers import CALLS_PER_STEP
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import DEFAULT_TRAIN_NUM_STEPS
from rectified_flow.runs.folder import program_flags, read_config
from rectified_flow.system.terminal import line, lines

Config = TypeVar("Config", bound=TrainConfig)
Measure: TypeAlias = Callable[[Config], float]
"""A function that measures the images per second of a training with these flags, on this process; 0 if its memory does
not suffice."""

DEFAULT_BUDGET = "1h"
"""Budget of runs on a folder of pictures and of runs with a teacher, unless a flag gives the length."""
FEWEST_TO_HOLD_OUT, HELD_OUT = 125, 30
"""Least number of pictures in a folder to hold some out, and least number of held-out pictures to measure on."""
FEW = 16_000
"""Number of pictures below which pictures are augmented, and a larger share of them is held out."""
PASSES, AUGMENTED_PASSES = 400, 1000
"""Numbers of passes over 64 pictures at 16 px up to which samples contain few copies: without, with augmentation."""
UNAUGMENTED_PASSES = 50
"""Largest number of passes for which pictures are not augmented, since so short a run does not memorise them."""
LEAST_IMAGES = 192_000
"""Number of images that a run may process, even with few pictures."""


@dataclass(frozen=True)
class Size:
    """A size of the network, and the least number of images for which it is better than the one before."""

    dim: int
    blocks: int
    images: int


SIZES = (Size(16, 1, 0), Size(24, 1, 4_000), Size(32, 1, 16_000), Size(48, 1, 60_000), Size(64, 1, 250_000))
"""Sizes of the network, in rising order."""
STARTER_DIM = 32
"""Channels of the network whose weights are those of ``--init_from starter``."""
STARTER_SIDE = 32
"""Least side of the pictures of a run that starts from the starter; more than 85% of its weights then come from it."""
SMALLEST_SIDE, MOST_LEVELS = 8, 5
"""Least side of the lowest level of the network, which has attention; largest number of levels."""
SHORT = {"learning_rate": 2e-3, "lr_decay": "cosine"}
OF_PICTURES: dict[type, dict[str, Any]] = {
    TrainRectifiedFlow: {"optimizer": "muon", **SHORT, "time_options": ("stratified=True",)},
    TrainMeanFlow: {**SHORT, "learning_rate": 1e-3},
}
"""Settings of the optimizer, and of the training times, for runs on pictures, by program."""
OF_TEACHER: dict[str, Any] = {"optimizer": "muon", **SHORT}
"""Settings of the optimizer for runs on the data of a teacher."""
LEAST_BATCH, LEAST_BATCH_OF_GPU, MOST_BATCH, STEPS = 8, 32, 256, 3000
"""Smallest batch size per process on a CPU and on a GPU, largest global batch size that is chosen, and least number of
steps of a run with more than the smallest batch size."""
BF16_GAIN = 1.1
"""Speed of bf16 on a CPU, as a multiple of that of float32, above which it is chosen."""
FEWEST_STEPS = 10
EMA_SHARE = 0.05
"""Time constant of the moving average of the weights, as a share of the steps."""
TRAINED_SHARE = 0.9
"""Share of the budget that the steps take; the rest is for previews, measurements and checkpoints."""
ROWS_SHARE = 1 / 3
"""Largest share of the budget that a teacher's data may take."""
FORWARD_SHARE = 0.35
"""Share of a training step that the forward pass takes."""
PREVIEW_SECONDS, PREVIEW_SHARE, LOG_SECONDS = 120.0, 0.05, 5.0
"""Times between previews and between lines of metrics [s]; the largest share of the time that previews may take."""
PREVIEWS, PREVIEW_CALLS = (64, 36, 16, 9, 4), 16
"""Numbers of samples in a preview, and the network calls for each."""
CHOSEN = (
    *("image_size", "augment", "holdout", "teacher_paths", "reflow_pairs"),
    *("global_batch_size", "num_epochs", "train_num_steps", "mixed_precision"),
    *("dim", "dim_mults", "dropout", "network_options", "init_from"),
    *("optimizer", "learning_rate", "lr_warmup_steps", "lr_decay", "ema_decay", "time_options"),
    *("sample_every", "num_samples", "sample_steps", "save_every", "log_every"),
)
"""Flags that a recipe may set, and ``num_epochs``, which ``train_num_steps`` replaces."""
LENGTHS = {"num_epochs", "train_num_steps"}
ALTERNATIVES = (
    LENGTHS,
    {"global_batch_size", "batch_size", "gradient_accumulation_steps"},
    {"dim", "dim_mults", "network", "network_options"},
    {"optimizer", "learning_rate", "optimizer_options"},
    {"flow", "time_distribution", "time_options"},
)
"""Groups of alternative flags. If the user sets one flag of a group, the recipe sets none of that group."""


def check_length(config: TrainConfig) -> None:
    """Check that at most one flag gives the length of the run.

    Raises:
        UsageError: if ``--budget``, ``--extend`` or ``--one_step`` is given together with a flag for the length or with
            ``--config``, ``--extend`` with another of the three, or ``--budget`` with ``--resume PATH``.
    """
    times = {"budget": config.program.budget, "extend": config.program.extend, "one_step": is_distilled(config)}
    for other in sorted(config.given & {*LENGTHS, "config", "extend"}):
        others = {name: value for name, value in times.items() if name != other}
        refuse(others, f"and --{other} exclude each other: pass one")
    if config.run.origin is not None:
        budget = {"budget": config.program.budget}
        refuse(budget, "excludes --resume PATH, which keeps the length of that run: pass --init_from PATH instead")


def with_recipe(config: Config, count: int, originals: OriginalInfo | None = None) -> Config:
    """Return the flags of a run on ``count`` pictures, and print the chosen ones. Collective.

    Flags on the command line take precedence. A resumed run, also with ``--resume PATH``, keeps its original settings.

    Args:
        config: the flags so far.
        count: number of pictures.
        originals: properties of the pictures before they were resized, if known.
    """
    if not may_choose(config):
        return config
    state, fixed = PartialState(), _fixed(config)
    before = on_main(state, lambda: _settings_of_run(config))
    if before is not None:
        kept = {name: value for name, value in before.items() if name not in _fixed(config, ALTERNATIVES[:2])}
        if kept.get("global_batch_size"):  # the number of processes may have changed
            whole = kept["global_batch_size"] // state.num_processes * state.num_processes
            kept["global_batch_size"] = max(whole, state.num_processes)
        state.print(line("recipe", "the settings recorded at the start of the run; flags override them"))
        return replaced(config, kept)
    flags: dict[str, Any] = {}
    if config.teacher_data is None:
        flags = for_pictures(count, augmentable=config.data.autoencoder is None)
        if budget_of(config) is not None and not config.program.look:
            flags.pop("augment", None)  # the plan decides it, when it knows the number of passes
        if originals is not None and config.data.autoencoder is None and config.data.aspect_ratio == "1:1":
            multiple = max(SMALLEST_SIDE, 2 ** (len(config.network.dim_mults) - 1))
            visible = max if config.data.crop == "none" else min
            side = ceil(visible(originals.width[1], originals.height[1]) / multiple) * multiple
            flags |= {"image_size": side} if side < config.data.image_size else {}
        flags = {name: value for name, value in flags.items() if name not in fixed}
    if flags:
        words = " ".join(command_line(flags))
        state.print(line("recipe", f"{words}, for {count:,} pictures; flags override them (docs/small_data.md)"))
    return replaced(config, flags)


def with_plan(config: Config, count: int, measure: Measure[Config], sides: tuple[int, int] | None = None) -> Config:
    """Return the flags of a run that takes the time of ``--budget``, and print the chosen ones. Collective.

    Args:
        config: the flags, with those that suit the pictures.
        count: number of pictures.
        measure: measures the images per second of a training with other flags, on this process.
        sides: height and width of the latents that the network works on; those of the pictures if not given.

    Raises:
        UsageError: if only few steps fit into the budget.
    """
    state = PartialState()
    begun = on_main(state, lambda: _settings_of_run(config)) is not None
    if config.program.extend is not None:
        return _extended(config, config.program.extend, state, measure)
    budget = budget_of(config)
    if budget is None or begun:
        return config
    framing = config.data.framing
    return _Planner(config, count, budget, measure, sides or (framing.height, framing.width)).plan()


def _extended(config: Config, time: str, state: PartialState, measure: Measure[Config]) -> Config:
    """Return the flags of a finished run with as many more steps as fit into a time; an unfinished run is finished.

    Raises:
        UsageError: if there is no run, or its length is not a number of steps.
    """
    saved = on_main(state, lambda: checkpoint.list_checkpoints(config.run.checkpoints))
    steps = config.run.train_num_steps or DEFAULT_TRAIN_NUM_STEPS
    if not saved:
        raise UsageError(f"--extend needs a run, and {config.run.checkpoints} has no checkpoint: pass --budget instead")
    if config.run.num_epochs is not None:
        raise UsageError("--extend needs a run whose length is a number of steps: raise --num_epochs instead")
    if checkpoint.step_of(saved[-1]) < steps:
        state.print(line("extend", f"training to the last step, {steps:,}, without extending; pass --extend again"))
        return config
    batch, rate = config.run.split_batch(state.num_processes).total, _rate(config, measure)
    more = max(1, int(TRAINED_SHARE * seconds_of(time) * rate / batch))
    state.print(line("extend", f"{more:,} steps of {batch} images in {time}, from step {steps:,} to {steps + more:,}"))
    return replaced(config, {"train_num_steps": steps + more})


def _rate(config: Config, measure: Measure[Config]) -> float:
    """Measure the images per second of all processes, by the slowest of them. Collective."""
    return PartialState().num_processes * min(gather_object([measure(config)]))


def _fixed(config: TrainConfig, alternatives: Iterable[set[str]] = ALTERNATIVES) -> set[str]:
    """Return the names of the flags that the user has set, and of the alternatives to them."""
    fixed = set(config.given)
    for names in alternatives:
        fixed |= names if fixed & names else set()
    return fixed


def budget_of(config: TrainConfig) -> str | None:
    """Return the time that the run is to take, or None if a flag gives its length."""
    if not may_choose(config) or config.given & LENGTHS:
        return None
    budget = config.program.budget or DEFAULT_BUDGET
    return f"{float(budget[:-1]) / 2:g}{budget[-1]}" if is_distilled(config) else budget


def is_distilled(config: TrainConfig) -> bool:
    """Return whether a mean flow learns from the run, for half of the budget."""
    return isinstance(config, TrainRectifiedFlow) and config.program.one_step


def may_choose(config: TrainConfig) -> bool:
    """Return whether flags may be chosen: with a folder of pictures, a teacher, ``--budget`` or ``--extend``.

    Without a time, nothing is chosen for other data, or for a config that was built in Python. With ``--config``,
    nothing is chosen.
    """
    own = config.data.dataset_path is not None or config.teacher_data is not None
    chooses = own and config.program.given is not None
    asked = config.program.budget is not None or config.program.extend is not None or is_distilled(config)
    return (chooses or asked) and config.program.config is None


def for_pictures(count: int, *, augmentable: bool = True) -> dict[str, Any]:
    """Return the flags that suit a number of pictures; docs/measurements/small_data.md has the measurements."""
    few = count < FEW
    flags: dict[str, Any] = {"augment": 0.15} if few and augmentable else {}
    if count >= FEWEST_TO_HOLD_OUT:
        flags["holdout"] = proposed_share(count, least=0.05 if few else 0.01)
    return flags


def proposed_share(count: int, least: float = 0.05) -> float:
    """Return the value of ``--holdout`` that holds out enough of ``count`` pictures, between ``least`` and 0.5."""
    return min(0.5, max(least, ceil(100 * HELD_OUT / count) / 100))


class _Planner(Generic[Config]):
    """The choice of a run's settings by its budget.

    Args:
        config: the flags so far.
        count: number of pictures.
        budget: the time, as in ``--budget``.
        measure: measures the images per second of a training on this process.
        sides: height and width of the data that the network works on.
    """

    def __init__(
        self, config: Config, count: int, budget: str, measure: Measure[Config], sides: tuple[int, int]
    ) -> None:
        self.config, self.fixed, self.count = config, _fixed(config), count
        self.measure, self.sides = measure, sides
        self.state, self.budget, self.seconds = PartialState(), budget, seconds_of(budget)

    def plan(self) -> Config:
        """Choose the settings, print them with their reasons, and return all flags of the run. Collective."""
        taught = self.config.teacher_data
        self._choose_batch(images=0)  # the smallest batch is the fastest to measure
        reason = "the network of the teacher"
        if taught is None and self.fixed.isdisjoint(ALTERNATIVES[2]):
            is_run = self.config.network.origin not in {None, STARTER_FOLDER}
            reason = (is_run and self._take_network()) or self._choose_size()
        elif taught is None:
            reason = "set by flags"
        self._set(OF_TEACHER if taught is not None else OF_PICTURES[type(self.config)])
        self._choose_precision()
        rate = self._rate()
        if rate == 0:
            raise UsageError("a step does not fit into the memory of the GPU: lower --image_size or --batch_size")
        if taught is not None:
            self.seconds -= self._choose_rows(taught, rate)
            if self.seconds <= 0:
                flag = f"--{taught.flag.removesuffix('_from')}_{taught.rows}"
                raise UsageError(f"generating the {taught.rows} would take all of --budget {self.budget}: lower {flag}")
        fitting, most, why = TRAINED_SHARE * self.seconds * rate, inf, "as many as fit into the time"
        if taught is None:
            if fitting > UNAUGMENTED_PASSES * self.count:
                self._set(for_pictures(self.count, augmentable=self.config.data.autoencoder is None))
            passes = AUGMENTED_PASSES if self.config.data.augment else PASSES
            most = max(LEAST_IMAGES, passes * self.count)
        before, slower = self.config, rate
        batch, rate = self._choose_batch(min(fitting, most)), self._rate()  # a larger batch is faster
        if rate == 0:  # but may exceed the memory of a GPU
            self.config, rate = before, slower
            batch = self.config.run.split_batch(self.state.num_processes).total
        fitting = TRAINED_SHARE * self.seconds * rate
        if fitting > most:
            why = f"at most {most / self.count:,.0f} passes, as longer runs memorise the pictures"
        steps = int(min(fitting, most) / batch)
        if steps < FEWEST_STEPS:
            raise UsageError(
                f"--budget {self.budget} is too short: a step of {batch} images takes {batch / rate:.1f} s on this "
                "machine; raise --budget, or lower --image_size"
            )
        length = {"train_num_steps": steps, "num_epochs": None, "lr_warmup_steps": max(10, steps // 50)}
        self._set(length | {"ema_decay": round(1 - 1 / max(10.0, EMA_SHARE * steps), 5)})
        self._set(intervals_of(batch / rate, rate, self.seconds))
        self._print(rate, reason, why)
        return self.config

    def _set(self, flags: Mapping[str, Any]) -> None:
        """Set flags that the user has not set."""
        self.config = replaced(self.config, {name: value for name, value in flags.items() if name not in self.fixed})

    def _rate(self) -> float:
        return _rate(self.config, self.measure)

    def _choose_size(self) -> str:
        """Choose the largest size of the network that the budget is long enough for, and return the reason.

        If the run can start from the starter, the starter's size is the smallest, or the only one if requested.
        """
        is_requested = self.config.network.origin == STARTER_FOLDER
        suits = is_requested or (suits_starter(self.config) and min(self.sides) >= STARTER_SIDE)
        sizes = [size for size in SIZES if not suits or size.dim >= STARTER_DIM][: 1 if is_requested else None]
        start, chosen = self.config, sizes[0]
        reason = "the network of the starter" if is_requested else "the largest size"
        for size in sizes:
            self.config = start
            self._set(flags_of(size, self.sides))
            images = TRAINED_SHARE * self.seconds * self._rate()
            if size is not sizes[0] and images < size.images:
                reason = f"--dim {size.dim} would process {images:,.0f} images, and needs {size.images:,}"
                break
            chosen = size
        self.config = start
        self._set(flags_of(chosen, self.sides) | ({"init_from": STARTER} if suits and chosen is sizes[0] else {}))
        return reason

    def _take_network(self) -> str:
        """Take the network of the run or checkpoint that this run starts from, if known, and return the reason."""
        origin = self.config.network.origin
        if origin is None:
            return ""
        flags = on_main(
            self.state, lambda: checkpoint.read(origin, flags_of_checkpoint, names=(checkpoint.CONFIG_FILE,))
        )
        names = (*ALTERNATIVES[2], "dropout")
        self._set(checked(type(self.config), {name: flags[name] for name in names if name in flags}, origin))
        return f"the network of {self.config.network.init_from}" if flags else ""

    def _choose_precision(self) -> None:
        """Choose bf16 for a rectified flow on a CPU that trains it faster than float32."""
        launcher_chose = "ACCELERATE_MIXED_PRECISION" in os.environ
        if self.state.device.type != "cpu" or launcher_chose or not isinstance(self.config, TrainRectifiedFlow):
            return
        rates = {}
        for precision in ("no", "bf16"):
            self._set({"mixed_precision": precision})
            rates[precision] = self._rate()
        self._set({"mixed_precision": "bf16" if rates["bf16"] > BF16_GAIN * rates["no"] else "no"})

    def _choose_rows(self, taught: TeacherData, rate: float) -> float:
        """Choose the number of paths or pairs to generate, and return the time that their generation takes [s]."""
        flag = f"{taught.flag.removesuffix('_from')}_{taught.rows}"
        stored = on_main(self.state, lambda: recipe_of(taught))
        if stored is not None:
            self._set({flag: stored.pairs})
            return 0.0
        calls = taught.steps * CALLS_PER_STEP[taught.solver] * (1 if taught.guidance_scale == 1 else 2)
        each = calls * FORWARD_SHARE / rate
        fitting, least = int(ROWS_SHARE * self.seconds / each), LEAST_BATCH * self.state.num_processes
        self._set({flag: max(least, min(taught.count, fitting))})
        chosen = self.config.teacher_data
        return each * (taught.count if chosen is None else chosen.count)

    def _choose_batch(self, images: float) -> int:
        """Choose the global batch size for a number of images, and return it."""
        if self.fixed.isdisjoint(ALTERNATIVES[1]):
            least = LEAST_BATCH_OF_GPU if self.state.device.type == "cuda" else LEAST_BATCH
            fitting = 2 ** int(log2(max(1.0, images / STEPS)))
            processes = self.state.num_processes
            batch = min(max(fitting, least * processes), MOST_BATCH)
            if self.config.teacher_data is not None:
                batch = max(processes, min(batch, self.config.teacher_data.count // processes * processes))
            self._set({"global_batch_size": ceil(batch / processes) * processes})
        return self.config.run.split_batch(self.state.num_processes).total

    def _print(self, rate: float, reason: str, why: str) -> None:
        """Print the plan."""
        run, processes = self.config.run, self.state.num_processes
        steps, batch = run.train_num_steps or 0, run.split_batch(processes).total
        flags = plain(self.config)
        settings = ("augment", "mixed_precision", "time_options")
        rates = ("optimizer", "learning_rate", "lr_decay", "lr_warmup_steps", "ema_decay", *settings)
        groups = {
            "network": (("dim", "dim_mults", "network_options", "init_from"), reason),
            "training": (rates, "see docs/budget.md"),
            "outputs": (("sample_every", "num_samples", "save_every"), "intervals in steps"),
        }
        machine = f"{processes} x {self.state.device.type} trains {rate:,.1f} images/s"
        words = {
            "budget": f"{self.budget} (--budget changes it): {machine}",
            "length": f"{steps:,} steps of {batch} = {steps * batch:,} images, {why}",
        }
        for name, (names, text) in groups.items():
            words[name] = f"{' '.join(command_line({each: flags[each] for each in names}))}; {text}"
        self.state.print(lines(words))


def smallest(config: Config) -> Config:
    """Return the flags of the smallest run that the plan may choose."""
    if budget_of(config) is None:
        return config
    least = {"dim": SIZES[0].dim, "global_batch_size": LEAST_BATCH * PartialState().num_processes}
    return replaced(config, {name: value for name, value in least.items() if name not in _fixed(config)})


def chooses_network(config: TrainConfig) -> bool:
    """Return whether the plan chooses the network, with levels that fit the sides of the data."""
    is_free = budget_of(config) is not None and _fixed(config).isdisjoint(ALTERNATIVES[2])
    return is_free and config.teacher_data is None


def suits_starter(config: TrainConfig) -> bool:
    """Return whether this run can start from the starter, an RGB rectified flow that predicts velocities."""
    data, unlike = config.data, {"init_from", "prediction", "flow", "space", "alpha", "autoencoder"} & config.given
    return isinstance(config, TrainRectifiedFlow) and data.dataset_path is not None and not unlike


def flags_of(size: Size, sides: tuple[int, int]) -> dict[str, Any]:
    """Return the flags of a network of a size for data of these sides.

    It has up to five levels. Each halves the sides, while they stay whole and the shorter one is at least 8.
    """
    levels = 1
    while levels < MOST_LEVELS and min(sides) // 2**levels >= SMALLEST_SIDE and gcd(*sides) % 2**levels == 0:
        levels += 1
    options = (f"blocks_per_level={size.blocks}", f"attention_sides=[{min(sides) // 2 ** (levels - 1)}]")
    mults = (*[1] * (levels - 3), *(1, 2, 3)[:levels])
    return {"dim": size.dim, "dim_mults": mults, "network_options": options, "dropout": 0.0}


def intervals_of(step: float, rate: float, budget: float) -> dict[str, Any]:
    """Return the intervals of previews, checkpoints and lines of metrics, and a number of samples that costs little.

    Args:
        step: time of a step [s].
        rate: images per second of the training.
        budget: time of the run [s].
    """
    interval = min(PREVIEW_SECONDS, budget / 4)
    sample = PREVIEW_CALLS * FORWARD_SHARE / rate  # time of a sample
    count = next((each for each in PREVIEWS if each * sample <= PREVIEW_SHARE * interval), PREVIEWS[-1])
    every = max(1, round(max(interval, count * sample / PREVIEW_SHARE) / step))
    return {
        "num_samples": count,
        "sample_steps": PREVIEW_CALLS // 2,
        "sample_every": every,
        "save_every": every,
        "log_every": min(50, max(1, round(LOG_SECONDS / step))),
    }


def _settings_of_run(config: Config) -> dict[str, Any] | None:
    """Return the flags of :data:`CHOSEN` that the run began with; None for a fresh run."""
    found = checkpoint.list_checkpoints(config.run.checkpoints)
    if not found and config.run.origin is not None:
        with suppress(UsageError):  # the trainer reports an unusable checkpoint
            found = [checkpoint.resolve(config.run.origin, (checkpoint.CONFIG_FILE,))]
    for newest in reversed(found):
        path = newest / checkpoint.CONFIG_FILE
        with suppress(DamageError):  # the trainer reports a damaged checkpoint
            flags = program_flags(read_config(path))
            return checked(type(config), {name: flags[name] for name in CHOSEN if name in flags}, path)
    return None
