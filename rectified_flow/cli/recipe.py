"""Hyperparameters that the program chooses by the number of pictures, where no flag sets them."""

from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.train_flags import TrainConfig
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, UsageError
from rectified_flow.flags import checked, command_line, replaced
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import DEFAULT_BATCH_SIZE, DEFAULT_TRAIN_NUM_STEPS
from rectified_flow.runs.folder import program_flags, read_config
from rectified_flow.system.terminal import line

Config = TypeVar("Config", bound=TrainConfig)


FEWEST_TO_HOLD_OUT, HELD_OUT = 125, 30
"""Least number of pictures in a folder to hold some out, and least number of held-out pictures to measure on."""
PASSES, AUGMENTED_PASSES = 400, 1000
"""Numbers of passes over 64 pictures at 16 px after which samples contain few copies: without, with augmentation."""
LEAST_STEPS = 3000
"""Least number of optimizer steps in a run, chosen to be well above the learning rate warm-up."""
LEAST_IMAGES, MOST_IMAGES = LEAST_STEPS * DEFAULT_BATCH_SIZE, DEFAULT_TRAIN_NUM_STEPS * DEFAULT_BATCH_SIZE
"""Least and largest number of images that a run is trained on; the largest is that of a run of default length.

The length is counted in images, so that it is the same on one GPU and on eight.
"""
CHOSEN = ("augment", "holdout", "num_epochs", "train_num_steps", "global_batch_size")
"""Flags that a recipe may set, and ``train_num_steps``, which ``num_epochs`` replaces."""
ALTERNATIVES = (
    {"num_epochs", "train_num_steps"},
    {"global_batch_size", "batch_size", "gradient_accumulation_steps"},
)
"""Groups of alternative flags. If the user sets one flag of a group, the recipe sets none of that group."""


def recipe_for(count: int, processes: int = 1, **fixed: float) -> dict[str, Any]:
    """Return flags that suit a number of pictures; docs/small_data.md has the measurements behind them.

    Args:
        count: number of pictures in the folder.
        processes: number of training processes.
        fixed: values of ``augment`` and ``holdout`` that the user has set.
    """
    few = count * PASSES < MOST_IMAGES
    flags: dict[str, Any] = {"augment": 0.15} if few else {}
    if count >= FEWEST_TO_HOLD_OUT:
        flags["holdout"] = proposed_share(count, least=0.05 if few else 0.01)
    flags |= fixed
    trained = count * (1 - flags.get("holdout", 0))
    passes = AUGMENTED_PASSES if flags.get("augment") else PASSES
    images = min(max(passes * trained, LEAST_IMAGES), MOST_IMAGES)
    flags |= {"num_epochs": max(1, round(images / trained))} | batch_for(images, processes)
    return {name: value for name, value in flags.items() if name not in fixed}


def taught_recipe(images_of_teacher: int, rows: int, processes: int = 1) -> dict[str, Any]:
    """Return flags of a run on a teacher's data: it is as long as the teacher's run, in images.

    Args:
        images_of_teacher: number of images that the teacher was trained on.
        rows: number of rows that the teacher generated.
        processes: number of training processes.
    """
    images = min(max(images_of_teacher, LEAST_IMAGES), MOST_IMAGES)
    return {"num_epochs": max(0.01, round(images / rows, 2))} | batch_for(images, processes)


def batch_for(images: float, processes: int) -> dict[str, int]:
    """Return a smaller global batch size if a run on ``images`` images would have too few steps with the default."""
    fitting = int(images) // LEAST_STEPS // processes * processes
    return {} if fitting >= DEFAULT_BATCH_SIZE * processes else {"global_batch_size": max(fitting, processes)}


def proposed_share(count: int, least: float = 0.05) -> float:
    """Return the value of ``--holdout`` that holds out enough of ``count`` pictures, between ``least`` and 0.5."""
    return min(0.5, max(least, ceil(100 * HELD_OUT / count) / 100))


def may_choose(config: TrainConfig) -> bool:
    """Return whether flags may be chosen: for the pictures of a folder, and for the data of a teacher.

    Nothing is chosen for a data set of the hub, or for a run by the flags of a file.
    """
    chooses = config.data.dataset_path is not None or config.teacher_data is not None
    return chooses and config.program.config is None


def with_recipe(config: Config, count: int) -> Config:
    """Return the flags of a run on ``count`` pictures or a teacher's data, and print the chosen ones. Collective.

    Flags on the command line take precedence. A resumed run, also with ``--resume PATH``, keeps its
    original settings.
    """
    if not may_choose(config):
        return config
    fixed = set(config.program.given)
    for names in ALTERNATIVES:
        fixed |= names if fixed & names else set()
    fixed |= {"augment"} if config.data.autoencoder is not None else set()  # augmentation needs pixels
    state = PartialState()
    before = on_main(state, lambda: _settings_of_run(config))
    if before is not None:
        kept = {name: value for name, value in before.items() if name not in fixed}
        if kept.get("global_batch_size"):  # the number of processes may have changed
            whole = kept["global_batch_size"] // state.num_processes * state.num_processes
            kept["global_batch_size"] = max(whole, state.num_processes)
        _print(state, {name: value for name, value in kept.items() if value}, "from the start of the run")
        return replaced(config, kept)
    fixed |= {"global_batch_size"} if "num_epochs" in fixed else set()  # the recipe fits the batch size to the length
    taught = config.teacher_data
    if taught is None:
        given = {name: getattr(config.data, name) for name in ("augment", "holdout") if name in fixed}
        recipe, reason = recipe_for(count, state.num_processes, **given), f"for {count:,} pictures"
        page = "docs/small_data.md"
    else:
        images = on_main(state, lambda: _images_seen(taught.source))
        recipe = {} if images is None else taught_recipe(images, taught.count, state.num_processes)
        reason, page = "for as many images as the teacher's run", "docs/mean_flow.md"
    flags = {name: value for name, value in recipe.items() if name not in fixed}
    _print(state, flags, f"{reason}; flags override it ({page})")
    return replaced(config, flags)


def _print(state: PartialState, flags: Mapping[str, Any], reason: str) -> None:
    if flags:
        words = command_line({name: int(value) if value == int(value) else value for name, value in flags.items()})
        state.print(line("recipe", f"{' '.join(words)}, {reason}"))


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


def _images_seen(source: Path) -> int | None:
    """Return the number of images that a checkpoint was trained on, if it is known."""
    with suppress(DamageError):
        return checkpoint.load_state(source).images_seen or None
    return None
