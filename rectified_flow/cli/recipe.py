"""Settings that suit the number of one's own pictures, where no flag says otherwise."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.cli.teacher import request_of
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, UsageError
from rectified_flow.flags import checked, command_line
from rectified_flow.report import line
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import DEFAULT_BATCH_SIZE, DEFAULT_TRAIN_NUM_STEPS
from rectified_flow.runs.document import program_flags, read_config

Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)


FEWEST_TO_HOLD_OUT, HELD_OUT = 125, 30
"""Pictures of a folder, and of those how many should be held out at least: fewer measure nothing."""
PASSES, AUGMENTED_PASSES = 400, 1000
"""Passes over the pictures without many copies among the samples, without and with augmentation: of 64 at 16 px."""
LEAST_IMAGES, MOST_IMAGES = 3000 * DEFAULT_BATCH_SIZE, DEFAULT_TRAIN_NUM_STEPS * DEFAULT_BATCH_SIZE
"""Images that a run is trained on at least, however few there are, and at most: those of the default length.

They are counted in images, as a run shall be the same on one GPU and on eight.
"""
CHOSEN = ("augment", "holdout", "num_epochs", "train_num_steps")
"""The flags that a recipe may choose, and the one that it may replace."""


def recipe_for(count: int, **fixed: float) -> dict[str, Any]:
    """Flags that suit a number of pictures; docs/small_data.md has the measurements behind them.

    Args:
        count: pictures in the folder.
        fixed: ``augment`` and ``holdout`` where they are not to be chosen.
    """
    few = count * PASSES < MOST_IMAGES
    flags: dict[str, Any] = {"augment": 0.15} if few else {}
    if count >= FEWEST_TO_HOLD_OUT:
        flags["holdout"] = max(0.05 if few else 0.01, _share_of_enough(count))
    flags |= fixed
    trained = count * (1 - flags.get("holdout", 0))
    passes = AUGMENTED_PASSES if flags.get("augment") else PASSES
    images = min(max(passes * trained, LEAST_IMAGES), MOST_IMAGES)
    flags["num_epochs"] = max(1, round(images / trained))
    return {name: value for name, value in flags.items() if name not in fixed}


def proposed_share(count: int) -> float:
    """A value of ``--holdout`` for a person who needs one, whatever the number of pictures."""
    return min(0.5, max(0.05, _share_of_enough(count)))


def _share_of_enough(count: int) -> float:
    return ceil(100 * HELD_OUT / count) / 100


def may_choose(config: TrainRectifiedFlow | TrainMeanFlow) -> bool:
    """Whether flags may be chosen: for pictures of one's own folder.

    Nothing is chosen for a data set of the hub, for a run by the flags of a file, or for one that learns what a teacher
    draws.
    """
    return config.data.dataset_path is not None and config.program.config is None and request_of(config) is None


def with_recipe(config: Config, count: int) -> Config:
    """The flags of a run on ``count`` pictures of one's own folder; what is chosen is printed. Collective.

    Flags of the command line stay. A run that resumes, its own or that of ``--resume PATH``, goes on with the settings
    that it began with.
    """
    if not may_choose(config):
        return config
    fixed = set(config.program.given)
    fixed |= {"num_epochs", "train_num_steps"} if fixed & {"num_epochs", "train_num_steps"} else set()
    fixed |= {"augment"} if config.data.autoencoder is not None else set()  # which needs pixels
    state = PartialState()
    before = on_main(state, lambda: _settings_of_run(config))
    if before is not None:
        kept = {name: value for name, value in before.items() if name not in fixed}
        _print(state, {name: value for name, value in kept.items() if value}, "as the run began")
        return _replaced(config, kept)
    recipe = recipe_for(count, **{name: getattr(config.data, name) for name in ("augment", "holdout") if name in fixed})
    flags = {name: value for name, value in recipe.items() if name not in fixed}
    _print(state, flags, f"for {count:,} pictures; flags override it (docs/small_data.md)")
    return _replaced(config, flags)


def _print(state: PartialState, flags: Mapping[str, Any], reason: str) -> None:
    if flags:
        words = command_line({name: int(value) if value == int(value) else value for name, value in flags.items()})
        state.print(line("recipe", f"{' '.join(words)}, {reason}"))


def _settings_of_run(config: Config) -> dict[str, Any] | None:
    """The flags of :data:`CHOSEN` that the run began with, None if it begins now; earlier versions lack some."""
    found = checkpoint.list_checkpoints(config.run.checkpoints)
    if not found and config.run.resume not in ("auto", "never"):
        with suppress(UsageError):  # of which the run itself will say more
            found = [checkpoint.resolve(Path(config.run.resume), warn=lambda _text: None)]
    for newest in reversed(found):
        path = newest / checkpoint.CONFIG_FILE
        with suppress(DamageError):  # likewise
            flags = program_flags(read_config(path))
            return checked(type(config), {name: flags[name] for name in CHOSEN if name in flags}, path)
    return None


def _replaced(config: Config, flags: Mapping[str, Any]) -> Config:
    """The config with other values of some flags, whichever part they are of."""
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    names = {name: {each.name for each in fields(part)} & flags.keys() for name, part in parts.items()}
    changed = {
        name: replace(parts[name], **{each: flags[each] for each in found}) for name, found in names.items() if found
    }
    return replace(config, **changed)
