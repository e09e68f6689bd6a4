"""The plan of a run: settings for a time budget and the speed of this machine.

With a budget, the program measures how fast this machine trains networks of several widths, chooses the widest network
for which the time suffices, and sets the number of steps. Flags that the user sets are never changed.
docs/measurements/budget.md has the measurements behind the settings.
"""

import os
from collections.abc import Mapping, Sequence
from math import ceil, exp, inf, log, log2
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from rectified_flow.cli.data import build_space
from rectified_flow.cli.flags.model import STARTER, STARTER_FOLDER, TeacherData
from rectified_flow.cli.flags.training import TrainConfig, TrainMeanFlow, TrainRectifiedFlow, seconds_of
from rectified_flow.cli.parts import build_flow
from rectified_flow.cli.training import recipe
from rectified_flow.cli.training.rows import recipe_of
from rectified_flow.cli.training.sizes import SIZES, STARTER_DIM, STARTER_SIDE, flags_of, suits_starter
from rectified_flow.cli.training.teacher import calls_for
from rectified_flow.condition import ConditionSpecs
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import checked, command_line, plain, replaced
from rectified_flow.load import autocast
from rectified_flow.networks.unet import to_device
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import DEFAULT_TRAIN_NUM_STEPS
from rectified_flow.spaces.space import Space
from rectified_flow.system.terminal import line, lines
from rectified_flow.training import costs
from rectified_flow.training.accelerator import choose_precision
from rectified_flow.training.optimizers import find_optimizer

PASSES, AUGMENTED_PASSES = 400, 1000
"""Numbers of passes over 64 pictures at 16 px up to which samples contain few copies: without, with augmentation."""
UNAUGMENTED_PASSES = 50
"""Largest number of passes for which pictures are not augmented, since so short a run does not memorise them."""
LEAST_IMAGES = 192_000
"""Number of images that a run may process, even with few pictures."""
SHORT = {"learning_rate": 2e-3, "lr_decay": "cosine"}
OF_PICTURES: dict[type, dict[str, Any]] = {
    TrainRectifiedFlow: {"optimizer": "muon", **SHORT, "time_options": ("stratified=True",)},
    TrainMeanFlow: {**SHORT, "learning_rate": 1e-3},
}
"""Settings of the optimizer, and of the training times, for runs on pictures, by program."""
OF_TEACHER: dict[str, dict[str, Any]] = {
    "paths": {"optimizer": "muon", **SHORT, "whole_fraction": 0.75, "flow_options": ("halves_fraction=0.5",)},
    "pairs": {"optimizer": "muon", **SHORT},
}
"""Settings of the optimizer, and of the intervals, for runs on paths or pairs of a teacher."""
LEAST_BATCH, LEAST_BATCH_OF_PATHS, LEAST_BATCH_OF_GPU = 8, 16, 32
"""Smallest batch size per process: on a CPU, on a CPU for paths of a teacher, and on a GPU."""
MOST_BATCH, STEPS = 256, 7000
"""Largest global batch size that is chosen, and least number of steps of a run with more than the smallest one."""
BF16_GAIN = 1.1
"""Speed of bf16 on a CPU, as a multiple of that of float32, above which it is chosen."""
FEWEST_STEPS = 10
EMA_SHARE = 0.05
"""Time constant of the moving average of the weights, as a share of the steps."""
TRAINED_SHARE = 0.9
"""Share of the budget that the steps take; the rest is for previews, measurements and checkpoints."""
ROWS_SHARE = {"paths": 1 / 4, "pairs": 1 / 3}
"""Largest share of the budget that a teacher's data may take."""
FORWARD_SHARE = 0.35
"""Share of a training step that the forward pass takes."""
PREVIEW_SECONDS, PREVIEW_SHARE, LOG_SECONDS = 120.0, 0.05, 5.0
"""Times between previews and between lines of metrics [s]; the largest share of the time that previews may take."""
PREVIEWS, PREVIEW_CALLS = (64, 36, 16, 9, 4), 16
"""Numbers of samples in a preview, and the network calls for each."""
MEASURED_SIDE = 32
"""Side of the pictures of :data:`MEASURED` [px]."""
MEASURED = {"drawn flowers": {25_848: 34.3, 102_688: 10.8}, "emoji": {25_904: 92.9, 118_208: 74.2}}
"""Fréchet distances of measured ``--budget`` runs, by the number of training images."""
UNMEASURED = {
    *("network", "network_options", "dim", "dim_mults", "dropout", "init_from", "optimizer", "optimizer_options"),
    *("learning_rate", "lr_decay", "flow", "flow_options", "prediction", "loss", "coupling", "time_distribution"),
    *("time_options", "space", "autoencoder", "alpha", "use_cfg", "source_path", "degrade", "condition_on"),
}
"""Flags that, if given, make a run differ from the measured runs."""


def with_plan(config: TrainConfig, count: int, conditions: ConditionSpecs, space: Space | None = None) -> TrainConfig:
    """Return the flags of a run that takes the time of ``--budget`` or ``--extend``, and print the chosen ones.

    Collective.

    Args:
        config: the flags, as returned by :func:`with_recipe`.
        count: number of pictures.
        conditions: conditions of the data.
        space: the space of the data, if it is not that of pictures.

    Raises:
        UsageError: if the budget is too short, a step exceeds the memory of a GPU, or there is no run to extend.
    """
    time = config.program.extend or recipe.budget_of(config)
    if time is None:
        return config
    planner = _Planner(config, count, time, conditions, space)
    if config.program.extend is not None:
        return planner.extend()
    begun = on_main(planner.state, lambda: recipe.settings_of_run(config)) is not None
    return config if begun else planner.plan()


class _Planner:
    """Chooses the settings of a run for its time budget.

    Args:
        config: the flags so far.
        count: number of pictures.
        time: the time, as in ``--budget``.
        conditions: conditions of the data.
        space: the space of the data, if it is not that of pictures.
    """

    def __init__(
        self, config: TrainConfig, count: int, time: str, conditions: ConditionSpecs, space: Space | None
    ) -> None:
        self.config, self.fixed, self.count = config, recipe.fixed_flags(config), count
        self.conditions, self.space = conditions, space
        shape = (space.shape if space else None) or config.data.framing.shape
        self.state, self.time, self.seconds, self.sides = PartialState(), time, seconds_of(time), shape[1:]
        self.rates: dict[TrainConfig, float] = {}
        """Measured images per second by flags, since the same flags are needed more than once."""

    def plan(self) -> TrainConfig:
        """Choose the settings, print them with their reasons, and return all flags of the run. Collective."""
        taught = self.config.teacher_data
        self._choose_batch(images=0)  # the smallest batch is the fastest to measure
        reason = "the network of the teacher"
        if taught is None and self.fixed.isdisjoint(recipe.NETWORK_FLAGS):
            reason = self._take_network() or self._choose_size()
        elif taught is None:
            reason = "set by flags"
        self._set(OF_TEACHER[taught.rows] if taught is not None else OF_PICTURES[type(self.config)])
        self._choose_precision()
        rate = self._rate()
        if rate == 0:
            raise UsageError("a step does not fit into the memory of the GPU: lower --image_size or --batch_size")
        if taught is not None:
            self.seconds -= self._choose_rows(taught, rate)
            if self.seconds <= 0:
                refusal = f"generating the {taught.rows} would take all of --budget {self.time}"
                raise UsageError(f"{refusal}: lower --{taught.count_flag}")
        fitting, most, why = TRAINED_SHARE * self.seconds * rate, inf, "as many as fit into the time"
        if taught is None:
            if fitting > UNAUGMENTED_PASSES * self.count:
                self._set(recipe.for_pictures(self.count, augmentable=self.config.data.autoencoder is None))
            passes = AUGMENTED_PASSES if self.config.data.augment else PASSES
            most = max(LEAST_IMAGES, passes * self.count)
        before = self.config
        self._choose_batch(min(fitting, most))
        faster = self._rate()  # a larger batch is faster, but may exceed the memory of a GPU
        self.config, rate = (self.config, faster) if faster > 0 else (before, rate)
        batch = self.config.run.split_batch(self.state.num_processes).total
        fitting = TRAINED_SHARE * self.seconds * rate
        if fitting > most:
            why = f"at most {most / self.count:,.0f} passes, as longer runs memorise the pictures"
        steps = int(min(fitting, most) / batch)
        if steps < FEWEST_STEPS:
            raise UsageError(
                f"--budget {self.time} is too short: a step of {batch} images takes {batch / rate:.1f} s on this "
                "machine; raise --budget, or lower --image_size"
            )
        length = {"train_num_steps": steps, "num_epochs": None, "lr_warmup_steps": max(10, steps // 50)}
        self._set(length | {"ema_decay": round(1 - 1 / max(10.0, EMA_SHARE * steps), 5)})
        self._set(intervals_of(batch / rate, rate, self.seconds, steps))
        self._print(rate, reason, why)
        return self.config

    def extend(self) -> TrainConfig:
        """Add as many steps to a finished run as fit into the time. Collective.

        An unfinished run is only trained to its last step.

        Raises:
            UsageError: if there is no run, or its length is not a number of steps.
        """
        run, state = self.config.run, self.state
        saved = on_main(state, lambda: checkpoint.list_checkpoints(run.checkpoints))
        steps = run.train_num_steps or DEFAULT_TRAIN_NUM_STEPS
        if not saved:
            raise UsageError(f"--extend needs a run, and {run.checkpoints} has no checkpoint: pass --budget instead")
        if run.num_epochs is not None:
            raise UsageError("--extend needs a run whose length is a number of steps: raise --num_epochs instead")
        if checkpoint.step_of(saved[-1]) < steps:
            text = f"the run is unfinished: training to its last step, {steps:,}, only; pass --extend again afterwards"
            state.print(line("extend", text))
            return self.config
        batch = run.split_batch(state.num_processes).total
        more = max(1, int(TRAINED_SHARE * self.seconds * self._rate() / batch))
        text = f"{more:,} steps of {batch} images in {self.time}, from step {steps:,} to {steps + more:,}"
        state.print(line("extend", text))
        return replaced(self.config, {"train_num_steps": steps + more})

    def _set(self, flags: Mapping[str, Any]) -> None:
        """Set flags that the user has not set."""
        self.config = replaced(self.config, {name: value for name, value in flags.items() if name not in self.fixed})

    def _rate(self) -> float:
        """Measure the images per second of all processes, by the slowest of them. Collective."""
        if self.config not in self.rates:
            rates = gather_object([training_rate(self.config, self.conditions, self.space)])
            self.rates[self.config] = self.state.num_processes * min(rates)
        return self.rates[self.config]

    def _choose_size(self) -> str:
        """Choose the largest size of the network that the budget is long enough for, and return the reason.

        If the run can start from the starter, the starter's size is the smallest, or the only one if requested.
        """
        is_requested = self.config.network.origin == STARTER_FOLDER
        suits = is_requested or (suits_starter(self.config) and min(self.sides) >= STARTER_SIDE)
        smallest, *larger = [dim for dim in SIZES if not suits or dim >= STARTER_DIM]
        self._set(flags_of(smallest, self.sides))
        if is_requested:
            return "the network of the starter"
        chosen, reason = self.config, "the largest size"
        for dim in larger:
            self._set(flags_of(dim, self.sides))
            images = TRAINED_SHARE * self.seconds * self._rate()
            if images < SIZES[dim]:
                reason = f"--dim {dim} would process {images:,.0f} images, and needs {SIZES[dim]:,}"
                break
            chosen = self.config
        self.config = chosen
        if suits and chosen.network.dim == smallest:
            self._set({"init_from": STARTER})
        return reason

    def _take_network(self) -> str:
        """Take the network of the run or checkpoint that this run starts from, if known, and return the reason."""
        origin = self.config.network.origin
        if origin is None or origin == STARTER_FOLDER:
            return ""
        flags = checkpoint.read(origin, recipe.flags_of_checkpoint, self.state, [checkpoint.CONFIG_FILE])
        names = {*recipe.NETWORK_FLAGS, "dropout"} & flags.keys()
        self._set(checked(type(self.config), {name: flags[name] for name in names}, origin))
        return f"the network of {self.config.network.init_from}" if flags else ""

    def _choose_precision(self) -> None:
        """Choose bf16 on a CPU if training is faster in bf16 than in float32.

        Mean flow on pictures stays in float32. Data that a teacher has begun to generate keep their precision.
        """
        taught, launcher_chose = self.config.teacher_data, "ACCELERATE_MIXED_PRECISION" in os.environ
        is_mean_flow = not isinstance(self.config, TrainRectifiedFlow) and taught is None
        if self.state.device.type != "cpu" or launcher_chose or is_mean_flow:
            return
        stored = None if taught is None else on_main(self.state, lambda: recipe_of(taught))
        if stored is not None:
            self._set({"mixed_precision": "bf16" if stored.precision == "bf16" else "no"})
            return
        rates = {}
        for precision in ("no", "bf16"):
            self._set({"mixed_precision": precision})
            rates[precision] = self._rate()
        self._set({"mixed_precision": "bf16" if rates["bf16"] > BF16_GAIN * rates["no"] else "no"})

    def _choose_rows(self, taught: TeacherData, rate: float) -> float:
        """Choose the number of paths or pairs to generate, and return the time that their generation takes [s]."""
        stored = on_main(self.state, lambda: recipe_of(taught))
        if stored is not None:
            self._set({taught.count_flag: stored.pairs})
            return 0.0
        each = calls_for(taught) * FORWARD_SHARE / rate
        fitting = int(ROWS_SHARE[taught.rows] * self.seconds / each)
        self._set({taught.count_flag: max(least_batch(self.config), min(taught.count, fitting))})
        chosen = self.config.teacher_data
        return each * (taught.count if chosen is None else chosen.count)

    def _choose_batch(self, images: float) -> None:
        """Choose the global batch size for a number of images."""
        if self.fixed.isdisjoint(recipe.BATCH_FLAGS):
            taught, processes = self.config.teacher_data, self.state.num_processes
            fitting = 2 ** int(log2(max(1.0, images / STEPS)))
            batch = min(max(fitting, least_batch(self.config)), MOST_BATCH)
            if taught is not None:
                batch = max(processes, min(batch, taught.count // processes * processes))
            self._set({"global_batch_size": ceil(batch / processes) * processes})

    def _print(self, rate: float, reason: str, why: str) -> None:
        """Print the plan."""
        run, processes, flags = self.config.run, self.state.num_processes, plain(self.config)
        steps, batch = run.train_num_steps or 0, run.split_batch(processes).total
        network = ("dim", "dim_mults", "network_options", "init_from")
        rates = ("optimizer", "learning_rate", "lr_decay", "lr_warmup_steps", "ema_decay")
        training = (*rates, "augment", "mixed_precision", "time_options", "flow_options")
        outputs = ("sample_every", "num_samples", "save_every")

        def words(names: Sequence[str]) -> str:
            return " ".join(command_line({name: flags[name] for name in names}))

        machine = f"{processes} x {self.state.device.type} trains {rate:,.1f} images/s"
        texts = {
            "budget": f"{self.time} (--budget changes it): {machine}",
            "length": f"{steps:,} steps of {batch} = {steps * batch:,} images, {why}",
            "network": f"{words(network)}; {reason}",
            "training": f"{words(training)}; see docs/budget.md",
            "outputs": f"{words(outputs)}; intervals in steps",
        }
        expected = expected_distances(steps * batch, self.sides)
        is_like = isinstance(self.config, TrainRectifiedFlow) and self.config.teacher_data is None
        if expected and is_like and self.config.given.isdisjoint(UNMEASURED):
            texts["compare"] = f"{expected}; docs/measurements/budget.md shows samples"
        self.state.print(lines(texts))


def expected_distances(images: int, sides: Sequence[int]) -> str:
    """Return a sentence on the distances of measured runs, interpolated; empty outside the measured range.

    Args:
        images: number of images that the run processes.
        sides: height and width of the data that the network works on.
    """
    distances = {
        name: exp(np.interp(log(images), np.log(list(curve)), np.log(list(curve.values()))))
        for name, curve in MEASURED.items()
        if min(curve) / 1.1 <= images <= 1.1 * max(curve) and set(sides) == {MEASURED_SIDE}
    }
    texts = [f"{distance:.0f} on {name}" for name, distance in distances.items()]
    start = "measured runs of this length had a Fréchet distance (efficientnet_lite0) of"
    return f"{start} {' and '.join(texts)}" if texts else ""


def least_batch(config: TrainConfig) -> int:
    """Return the smallest global batch size that the plan may choose."""
    state, taught = PartialState(), config.teacher_data
    of_cpu = LEAST_BATCH_OF_PATHS if taught is not None and taught.rows == "paths" else LEAST_BATCH
    return state.num_processes * (LEAST_BATCH_OF_GPU if state.device.type == "cuda" else of_cpu)


def smallest(config: TrainConfig) -> TrainConfig:
    """Return the flags of the smallest run that the plan may choose."""
    if recipe.budget_of(config) is None:
        return config
    least = {"dim": min(SIZES), "global_batch_size": least_batch(config)}
    return replaced(config, {name: value for name, value in least.items() if name not in recipe.fixed_flags(config)})


def intervals_of(step: float, rate: float, budget: float, steps: int) -> dict[str, Any]:
    """Return the intervals of previews, checkpoints and lines of metrics, and a number of samples that costs little.

    Args:
        step: time of a step [s].
        rate: images per second of the training.
        budget: time of the run [s].
        steps: steps of the run.
    """
    interval = min(PREVIEW_SECONDS, budget / 4)
    sample = PREVIEW_CALLS * FORWARD_SHARE / rate  # time of a sample
    count = next((each for each in PREVIEWS if each * sample <= PREVIEW_SHARE * interval), PREVIEWS[-1])
    every = max(1, round(max(interval, count * sample / PREVIEW_SHARE) / step))
    return {
        "num_samples": count,
        "sample_steps": PREVIEW_CALLS,
        "sample_every": every,
        "save_every": min(every, max(1, round(checkpoint.EARLY * steps))),  # for an early checkpoint
        "log_every": min(50, max(1, round(LOG_SECONDS / step))),
    }


def training_rate(config: TrainConfig, conditions: ConditionSpecs, space: Space | None = None) -> float:
    """Measure the images per second of a training with these flags on this process; 0 if a GPU's memory is too small.

    Args:
        config: all flags.
        conditions: conditions of the data.
        space: the space of the data, if it is not that of pictures.
    """
    state, space = PartialState(), space or build_space(config.data)
    with torch.random.fork_rng():  # the initial weights of the run do not depend on how many networks are measured
        flow = build_flow(config, conditions, space)
    precision = choose_precision(config.run, state.device)
    to_device(flow, state.device, precision).train()
    item = costs.blank_item(flow, config.teacher_data.path_points if config.teacher_data else 0, state.device)
    count = config.run.split_batch(state.num_processes).per_process
    optimizer = find_optimizer(config.run, fused=state.device.type == "cuda")
    try:
        return costs.measure_rate(flow, optimizer, item, count, lambda: autocast(precision, state.device))
    except torch.OutOfMemoryError:
        return 0.0
