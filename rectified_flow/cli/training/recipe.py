"""Settings chosen by the number of pictures, and recorded settings that a resumed run keeps.

Flags that the user sets are never changed. The chosen flags are recorded, so a resumed run has the same ones.
docs/measurements/small_data.md has the measurements behind the settings.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from accelerate import PartialState

from rectified_flow.cli.flags.training import TrainConfig
from rectified_flow.data.store import OriginalInfo
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, UsageError
from rectified_flow.flags import checked, command_line, refuse, replaced
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import program_flags, read_config
from rectified_flow.system.terminal import line

DEFAULT_BUDGET = "1h"
"""Budget of runs on a folder of pictures and of runs with a teacher, unless a flag gives the length."""
FEWEST_TO_HOLD_OUT, HELD_OUT = 125, 30
"""Least number of pictures in a folder to hold some out, and least number of held-out pictures to measure on."""
FEW = 16_000
"""Number of pictures below which pictures are augmented, and a larger share of them is held out."""
SMALLEST_SIDE = 8
"""Least side of the lowest level of the network, which has attention [px]."""
CHOSEN = (
    *("image_size", "augment", "holdout", "teacher_paths", "reflow_pairs"),
    *("global_batch_size", "num_epochs", "train_num_steps", "mixed_precision"),
    *("dim", "dim_mults", "dropout", "network_options", "init_from"),
    *("optimizer", "learning_rate", "lr_warmup_steps", "lr_decay", "ema_decay", "time_options"),
    *("whole_fraction", "flow_options"),
    *("sample_every", "num_samples", "sample_steps", "save_every", "log_every"),
)
"""Flags that a recipe may set, and ``num_epochs``, which ``train_num_steps`` replaces."""
LENGTH_FLAGS = {"num_epochs", "train_num_steps"}
BATCH_FLAGS = {"global_batch_size", "batch_size", "gradient_accumulation_steps"}
NETWORK_FLAGS = ("network", "dim", "dim_mults", "network_options")
ALTERNATIVES = (
    LENGTH_FLAGS,
    BATCH_FLAGS,
    {*NETWORK_FLAGS},
    {"optimizer", "learning_rate", "optimizer_options"},
    {"flow", "time_distribution", "time_options"},
    {"flow", "flow_options"},
)
"""Groups of alternative flags. If the user sets one flag of a group, the recipe sets none of that group."""


def check_length(config: TrainConfig) -> None:
    """Check that at most one flag gives the length of the run.

    Raises:
        UsageError: if ``--budget``, ``--extend`` or ``--one_step`` is given together with a flag for the length or with
            ``--config``, ``--extend`` with another of the three, or ``--budget`` with ``--resume PATH``.
    """
    times = {"budget": config.program.budget, "extend": config.program.extend, "one_step": config.program.one_step}
    for other in sorted(config.given & {*LENGTH_FLAGS, "config", "extend"}):
        others = {name: value for name, value in times.items() if name != other}
        refuse(others, f"and --{other} exclude each other: pass one")
    if config.run.origin is not None:
        budget = {"budget": config.program.budget}
        refuse(budget, "excludes --resume PATH, which keeps the length of that run: pass --init_from PATH instead")


def with_recipe(config: TrainConfig, count: int, originals: OriginalInfo | None = None) -> TrainConfig:
    """Return the flags of a run on ``count`` pictures, and print the chosen ones. Collective.

    Flags on the command line take precedence. A resumed run, also with ``--resume PATH``, keeps its original settings.

    Args:
        config: the flags so far.
        count: number of pictures.
        originals: properties of the pictures before they were resized, if known.
    """
    if not may_choose(config):
        return config
    state, fixed = PartialState(), fixed_flags(config)
    before = on_main(state, lambda: settings_of_run(config))
    if before is not None:
        kept = {
            name: value
            for name, value in before.items()
            if name not in fixed_flags(config, (LENGTH_FLAGS, BATCH_FLAGS))
        }
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


def fixed_flags(config: TrainConfig, alternatives: Iterable[set[str]] = ALTERNATIVES) -> set[str]:
    """Return the names of the flags that the user has set, and of the alternatives to them."""
    fixed = set(config.given)
    for names in alternatives:
        fixed |= names if fixed & names else set()
    return fixed


def budget_of(config: TrainConfig) -> str | None:
    """Return the time that the run is to take, or None if a flag gives its length."""
    if not may_choose(config) or config.given & LENGTH_FLAGS:
        return None
    budget = config.program.budget or DEFAULT_BUDGET
    return f"{float(budget[:-1]) / 2:g}{budget[-1]}" if config.program.one_step else budget


def may_choose(config: TrainConfig) -> bool:
    """Return whether flags may be chosen: with a folder of pictures, a teacher, ``--budget`` or ``--extend``.

    Without a time, nothing is chosen for other data, or for a config that was built in Python. With ``--config``,
    nothing is chosen.
    """
    own = config.data.dataset_path is not None or config.teacher_data is not None
    chooses = own and config.program.given is not None
    asked = config.program.budget is not None or config.program.extend is not None or config.program.one_step
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


def settings_of_run(config: TrainConfig) -> dict[str, Any] | None:
    """Return the flags of :data:`CHOSEN` that the run began with; None for a fresh run."""
    return flags_of_run(config, CHOSEN)


def flags_of_run(config: TrainConfig, names: Sequence[str] = ("space",)) -> dict[str, Any] | None:
    """Return some flags that the run began with; None for a fresh run."""
    found = checkpoint.list_checkpoints(config.run.checkpoints)
    if not found and config.run.origin is not None:
        with suppress(UsageError):  # the trainer reports an unusable checkpoint
            found = [checkpoint.resolve(config.run.origin, (checkpoint.CONFIG_FILE,))]
    for newest in reversed(found):
        path = newest / checkpoint.CONFIG_FILE
        with suppress(DamageError):  # the trainer reports a damaged checkpoint
            flags = program_flags(read_config(path))
            return checked(type(config), {name: flags[name] for name in names if name in flags}, path)
    return None


def flags_of_checkpoint(source: Path) -> dict[str, Any]:
    """Return the flags of the program that wrote a checkpoint; none if no program did.

    Raises:
        DamageError: if they cannot be read.
    """
    path = source / checkpoint.CONFIG_FILE
    return program_flags(read_config(path)) if path.exists() else {}
