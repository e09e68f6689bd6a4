"""Settings that suit the number of one's own pictures, where no flag says otherwise."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import ceil
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.cli.teacher import request_of
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError
from rectified_flow.flags import checked, command_line
from rectified_flow.report import line
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import DEFAULT_TRAIN_NUM_STEPS
from rectified_flow.runs.document import program_flags, read_config

Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)


FEWEST_TO_HOLD_OUT, HELD_OUT = 125, 30
"""Pictures of a folder, and of those how many should be held out at least: fewer measure nothing."""
FEW = 10_000
"""Pictures, above which augmentation is not worth its price."""
PASSES, AUGMENTED_PASSES = 400, 1000
"""Passes over the pictures before samples become copies, without and with augmentation."""
LEAST_STEPS = 3000
"""Steps without which a network has learned little."""
CHOSEN = ("augment", "holdout", "train_num_steps")
"""The flags that a recipe may choose."""


def recipe_for(count: int, batch: int, **given: float) -> dict[str, Any]:
    """Flags that suit a number of pictures; docs/small_data.md has the measurements behind them.

    Args:
        count: pictures in the folder.
        batch: global batch size.
        given: ``augment`` and ``holdout`` where they are not to be chosen.
    """
    flags: dict[str, Any] = {"augment": 0.15} if count <= FEW else {}
    if count >= FEWEST_TO_HOLD_OUT:
        flags["holdout"] = max(0.05 if count <= FEW else 0.01, ceil(100 * HELD_OUT / count) / 100)
    flags |= given
    passes = AUGMENTED_PASSES if flags.get("augment") else PASSES
    steps = max(LEAST_STEPS, int(passes * count * (1 - flags.get("holdout", 0))) // batch)
    if steps < DEFAULT_TRAIN_NUM_STEPS:
        flags["train_num_steps"] = steps
    return {name: value for name, value in flags.items() if name not in given}


def with_recipe(config: Config, count: int) -> Config:
    """The flags of a run on ``count`` pictures of one's own folder; what is chosen is printed. Collective.

    Flags of the command line stay, and a run that resumes goes on with the settings that it began with. Nothing is
    chosen for a data set of the hub, for a run by the flags of a file, or for one that learns what a teacher draws.
    """
    if config.data.dataset_path is None or config.program.config is not None or request_of(config) is not None:
        return config
    taken = {*config.program.given, *(("train_num_steps",) if "num_epochs" in config.program.given else ())}
    taken |= {"augment"} if config.data.autoencoder is not None else set()  # which needs pixels
    state = PartialState()
    before = on_main(state, lambda: _flags_of_run(config))
    if before is not None:
        return _replaced(config, {name: before[name] for name in CHOSEN if name in before and name not in taken})
    given = {name: getattr(config.data, name) for name in ("augment", "holdout") if name in taken}
    recipe = recipe_for(count, config.run.split_batch(state.num_processes).total, **given)
    flags = {name: value for name, value in recipe.items() if name not in taken}
    if flags:
        chosen = " ".join(command_line(flags))
        state.print(line("recipe", f"{chosen}, for {count:,} pictures; flags override it (docs/small_data.md)"))
    return _replaced(config, flags)


def _flags_of_run(config: Config) -> dict[str, Any] | None:
    """The flags that the run began with, None if it begins now; earlier versions lack some."""
    for newest in reversed(checkpoint.list_checkpoints(config.run.checkpoints)):
        path = newest / checkpoint.CONFIG_FILE
        with suppress(DamageError):  # of which the run itself will say more
            return checked(type(config), program_flags(read_config(path)), path)
    return None


def _replaced(config: Config, flags: Mapping[str, Any]) -> Config:
    """The config with other values of some flags, whichever part they are of."""
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    names = {name: {each.name for each in fields(part)} & flags.keys() for name, part in parts.items()}
    changed = {name: replace(parts[name], **{each: flags[each] for each in found}) for name, found in names.items()}
    return replace(config, **changed)
