"""Settings that suit the number of one's own pictures, where no flag says otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.cli.teacher import request_of
from rectified_flow.distributed.collectives import on_main
from rectified_flow.flags import checked, command_line
from rectified_flow.report import line
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import program_flags, read_config

Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)


@dataclass(frozen=True)
class Recipe:
    """Flags for up to ``most`` pictures; docs/small_data.md has what was measured of them."""

    most: float
    flags: Mapping[str, Any]


RECIPES = (
    Recipe(160, {"dim": 32, "augment": 0.15, "train_num_steps": 5_000}),  # too few to hold some out
    Recipe(1_000, {"dim": 32, "augment": 0.15, "holdout": 0.1, "stop_when_memorising": True}),
    Recipe(10_000, {"augment": 0.15, "holdout": 0.05, "stop_when_memorising": True}),
    Recipe(float("inf"), {"holdout": 0.01}),
)


def with_recipe(config: Config, count: int) -> Config:
    """The flags of a run on ``count`` pictures of one's own folder; what is chosen is printed. Collective.

    Flags of the command line stay, and a run that resumes goes on with the settings that it began with. Nothing is
    chosen for a data set of the hub, or for a run that learns what a teacher draws.
    """
    if config.data.dataset_path is None or request_of(config) is not None:
        return config
    recipe = next(recipe for recipe in RECIPES if count <= recipe.most)
    taken = {*config.program.given, *(("train_num_steps",) if "num_epochs" in config.program.given else ())}
    taken |= {"augment"} if config.data.autoencoder is not None else set()  # which needs pixels
    flags = {name: value for name, value in recipe.flags.items() if name not in taken}
    state = PartialState()
    before = on_main(state, lambda: _flags_of_run(config))
    if before is not None:
        return _replaced(config, {name: value for name, value in before.items() if name in flags})
    if flags:
        chosen = " ".join(command_line(flags))
        state.print(line("recipe", f"{chosen}, for {count:,} pictures; flags override it (docs/small_data.md)"))
    return _replaced(config, flags)


def _flags_of_run(config: Config) -> dict[str, Any] | None:
    """The flags that the run began with, None if it begins now; earlier versions lack some."""
    for newest in checkpoint.list_checkpoints(config.run.checkpoints)[-1:]:
        path = newest / checkpoint.CONFIG_FILE
        return checked(type(config), program_flags(read_config(path)), path)
    return None


def _replaced(config: Config, flags: Mapping[str, Any]) -> Config:
    """The config with other values of some flags, whichever part they are of."""
    parts = {part.name: getattr(config, part.name) for part in fields(config)}
    names = {name: {each.name for each in fields(part)} & flags.keys() for name, part in parts.items()}
    changed = {name: replace(parts[name], **{each: flags[each] for each in found}) for name, found in names.items()}
    return replace(config, **changed)
