"""From the command line to a config, one group of ``--help`` for each part of the config."""

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rectified_flow.errors import UsageError
from rectified_flow.flags import checked, command_line, names, plain
from rectified_flow.runs.document import program_flags, read_config, require_flags

C = TypeVar("C")
OVERRIDES = {
    "train_num_steps": ("num_epochs",),
    "num_epochs": ("train_num_steps",),
    "dataset": ("dataset_path",),
    "output_dir": ("checkpoint_dir", "pairs_dir", "paths_dir", "resume"),
}
"""Flags in the file of ``--config`` that another flag on the command line overrides, too."""


def parse(config_class: type[C], description: str, arguments: Sequence[str] | None = None, *, quiet: bool = False) -> C:
    """Read the command line into ``config_class``, after the flags of the file that ``--config`` names.

    ``--help`` and errors exit, silently if ``quiet``.

    Raises:
        UsageError: if the values make no valid config, or the file of ``--config`` cannot be used.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _refuse_empty(arguments)
    arguments = [*_unset(config_class, arguments), *_from_file(config_class, arguments), *arguments]
    explanation = io.StringIO()
    try:
        with redirect_stderr(explanation):
            config = tyro.cli(
                config_class,
                args=arguments,
                description=description,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
                use_underscores=True,
                console_outputs=not quiet,
            )
    except SystemExit as end:
        refusal = _usage_error(end)
        if refusal is not None:
            raise refusal from None
        if not quiet:
            sys.stderr.write(explanation.getvalue())
        raise
    if hasattr(config, "program"):
        object.__setattr__(config.program, "given", frozenset(_given(arguments)))
    return config


def _refuse_empty(arguments: Sequence[str]) -> None:
    """An empty value is a variable that was not set, and as a path it would mean the current folder."""
    for word, value in pairwise([*arguments, "end"]):
        if word.startswith("--") and (value == "" or word.endswith("=")):
            raise UsageError(f"{word.rstrip('=')} is empty: is a variable not set?")


def _unset(config_class: type, arguments: Sequence[str]) -> list[str]:
    """The words that unset a program's own default number of steps, where a number of epochs is given."""
    epochs = {"num_epochs", "train_num_steps"} <= set(names(config_class)) and "num_epochs" in _given(arguments)
    return ["--train_num_steps", "None"] if epochs else []


def _given(arguments: Sequence[str]) -> set[str]:
    """The names of the flags on the command line."""
    words = (word.split("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--"))
    return {word.removeprefix("no_") for word in words}


def _from_file(config_class: type, arguments: Sequence[str]) -> list[str]:
    """The words that stand for the file of ``--config``, if there is one."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    try:
        path = finder.parse_known_args(arguments)[0].config
    except SystemExit:  # --config without a file, which the real parser explains
        return []
    known = names(config_class)
    if path is None or "config" not in known:
        return []
    document = read_config(path)
    require_flags(document, path)
    flags = program_flags(document)
    unknown = [name for name in flags if name not in known]
    if unknown:
        raise UsageError(f"--config {path} sets flags that this program does not have: {', '.join(unknown)}")
    checked(config_class, flags, path)  # the words of a list could set other flags
    given = _given(arguments)
    modules = flags.pop("import", None)
    if modules and "import" not in given:
        raise UsageError(
            f"--config {path} is of a run with --import {' '.join(modules)}: pass that again, as no file makes a "
            "program import code"
        )
    overridden = {name for flag in given for name in OVERRIDES.get(flag, ())}
    return command_line({name: value for name, value in flags.items() if name not in overridden})


def _usage_error(error: BaseException | None) -> UsageError | None:
    """The UsageError that led to ``error``: tyro turns those of a config into its own, with a box around them."""
    while error is not None and not isinstance(error, UsageError):
        error = error.__context__
    return error


def recorded(config: Any) -> dict[str, Any]:
    """The flags that a run's ``config.json`` keeps, to start the run again."""
    return {name: value for name, value in plain(config).items() if name not in ("config", "dry_run", "look")}
