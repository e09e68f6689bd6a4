"""The settings of a program: layers of flags, from the defaults up to what the user gave."""

import importlib
import io
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import tyro

from rectified_flow.cli.budget import with_joined_time
from rectified_flow.cli.hints import hints
from rectified_flow.errors import DamageError, UsageError, first_line
from rectified_flow.flags import C, defaults_of, flag_types, is_default, rules_of, values_of, with_values
from rectified_flow.system.files import check_document, read_document
from rectified_flow.system.terminal import at_least_wide, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C_co = TypeVar("C_co", bound="DataclassInstance", covariant=True)
Layer = Literal["default", "recorded", "teacher", "chosen", "file", "given"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
"""The layers from the bottom up: defaults of the program; flags that the run began with; those of the run of its
teacher; those that the program chose, for example by a plan; those of the file of ``--config``; those of the command
line."""
Flags = Mapping[str, Any]
"""Values of flags by name."""
OPTIONS = (tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
"""Options of the parser of command lines."""
NARROWEST = 20
"""Smallest width of a help text in columns."""


class Settings(Generic[C_co]):
    """The flags of a program in layers. A flag has the value of the uppermost layer that has it.

    A stage of a program returns a layer, and nothing changes a value in place. A flag that is declared to exclude or
    replace another flag hides the value of that flag in the layers below: ``--num_epochs`` hides a recorded
    ``--train_num_steps``.

    Args:
        kind: the dataclass of the program's groups of flags.
        layers: the flags of each layer but the lowest.
        began: when the program began, by :func:`time.monotonic`; now if not given.
    """

    def __init__(self, kind: type[C_co], layers: Mapping[Layer, Flags], began: float | None = None) -> None:
        self.kind, self.layers = kind, dict(layers)
        self.began = time.monotonic() if began is None else began

    def with_layer(self, layer: Layer, flags: Flags) -> "Settings[C_co]":
        """Return settings with further flags in a layer."""
        return Settings(self.kind, self.layers | {layer: {**self.layers.get(layer, {}), **flags}}, self.began)

    def resolving(self, flags: Flags) -> "Settings[C_co]":
        """Return settings with values in place of those that leave something open, such as an image size of 0.

        A value replaces the open value in its layer; in place of a default, it is in the layer ``chosen``.
        """
        layers = dict(self.layers)
        for name, value in flags.items():
            origin = self.origin(name)
            layer: Layer = "chosen" if origin == "default" else origin
            layers[layer] = {**layers.get(layer, {}), name: value}
        return Settings(self.kind, layers, self.began)

    def begun_before(self, seconds: float) -> "Settings[C_co]":
        """Return these settings with the start of the program moved back by a number of seconds."""
        return Settings(self.kind, self.layers, self.began - seconds)

    @cached_property
    def values(self) -> C_co:
        """The groups of flags, with the values of all layers together."""
        return with_values(self.kind(), {name: value for name, (value, _) in self._folded.items()})

    def origin(self, name: str) -> Layer:
        """Return the layer that the value of a flag comes from."""
        return self._folded[name][1]

    @cached_property
    def given(self) -> frozenset[str]:
        """Names of the flags that the user gave, on the command line or in a file."""
        return frozenset({*self.layers.get("file", {}), *self.layers.get("given", {})})

    @cached_property
    def fixed(self) -> frozenset[str]:
        """Names of the flags that a plan must not set: those given, and those of the same choice as a given one."""
        rules = rules_of(self.kind)
        made = {rules[name].choice for name in self.given & rules.keys()} - {""}
        return self.given | {name for name, rule in rules.items() if rule.choice in made}

    @cached_property
    def changed(self) -> frozenset[str]:
        """Names of the flags that the user gave and whose values differ from the defaults."""
        defaults, values = defaults_of(self.kind), values_of(self.values)
        return frozenset(name for name in self.given if not is_default(values[name], defaults[name]))

    @cached_property
    def _folded(self) -> dict[str, tuple[Any, Layer]]:
        """The value of each flag, and the layer that it comes from."""
        rules, defaults = rules_of(self.kind), defaults_of(self.kind)
        folded: dict[str, tuple[Any, Layer]]
        folded = {name: (value, "default") for name, value in values_of(self.kind()).items()}
        for layer in LAYERS:
            flags = {name: value for name, value in self.layers.get(layer, {}).items() if name in folded}
            # A flag at its default, such as --holdout 0, excludes no other, nor does a flag that a run does not record.
            excluding = {name for name in flags if rules[name].recorded and not is_default(flags[name], defaults[name])}
            hidden = {other for name in flags for other in rules[name].replaces.split()}
            hidden |= {other for name in excluding for other in rules[name].excludes.split()}
            hidden |= {name for name, rule in rules.items() if excluding.intersection(rule.excludes.split())}
            folded |= {name: (defaults[name], "default") for name in hidden - flags.keys()}
            folded |= {name: (value, layer) for name, value in flags.items()}
        return folded


def parse(config_class: type[C], description: str, arguments: Sequence[str] | None = None) -> C:
    """Return the groups of flags that the command line gives, with those in the file of ``--config`` below them."""
    return read_settings(config_class, description, arguments).values


def read_settings(
    config_class: type[C], description: str, arguments: Sequence[str] | None = None, *, quiet: bool = False
) -> Settings[C]:
    """Return the settings that the command line gives. ``--help`` and errors exit, silently if ``quiet``."""
    began = time.monotonic()
    arguments = with_joined_time(sys.argv[1:] if arguments is None else arguments)
    for word, value in pairwise(["", *arguments, "end"]):
        name = word if word.startswith("--") else "an argument"
        if value == "" or name.endswith("="):  # an empty path would mean the current folder
            raise UsageError(f"{name.rstrip('=')} is empty: check whether a variable is unset")
    words = [word.split("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--")]
    names = {word.removeprefix("no_") for word in words}
    values, defaults = values_of(_parsed(config_class, description, arguments, quiet=quiet)), values_of(config_class())
    for name, kind in flag_types(config_class).items():  # the parser would drop the values of all but the last
        is_list = isinstance(values[name], tuple) and tyro.conf.UseAppendAction not in getattr(kind, "__metadata__", ())
        if is_list and words.count(name) > 1:
            raise UsageError(f"--{name} is given twice: pass all values after one --{name}")
    # An argument without a flag, such as the folder of watch, has no name on the command line.
    given = {name for name, value in values.items() if name in names or not is_default(value, defaults[name])}
    layers: dict[Layer, Flags] = {"given": {name: value for name, value in values.items() if name in given}}
    if isinstance(file := values.get("config"), Path):
        layers["file"] = _from_file(config_class, file, names)
    settings = Settings(config_class, layers, began)
    check_rules(settings.values, settings.given, layers.get("file", {}).keys() - names)
    return settings


def _parsed(config_class: type[C], description: str, arguments: Sequence[str], *, quiet: bool) -> C:
    """Return the groups of flags of the command line alone."""
    explanation = io.StringIO()
    try:
        with redirect_stderr(explanation), at_least_wide(NARROWEST):
            return tyro.cli(
                config_class,
                args=arguments,
                description=description,
                config=OPTIONS,
                use_underscores=True,
                console_outputs=not quiet,
            )
    except SystemExit as end:
        cause: BaseException | None = end
        while cause is not None and not isinstance(cause, UsageError):  # tyro prints one of a config in a box
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        if end.code and not quiet:
            own = getattr(config_class, "RUN_FLAG", "")
            texts = hints(_unknown(config_class, arguments), arguments, flag_types(config_class), own)
            sys.stderr.write(explanation.getvalue() + "".join(f"{shown(text)}\n" for text in texts))
        raise


def _unknown(config_class: type[Any], arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line that no flag has; none if it fails for another reason."""
    with suppress(SystemExit), redirect_stderr(io.StringIO()), at_least_wide(NARROWEST):
        _, unknown = tyro.cli(
            config_class, args=arguments, return_unknown_args=True, config=OPTIONS, use_underscores=True
        )
        return unknown
    return []


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Return the words that set these flags on a command line; None and empty lists leave a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def check_rules(config: Any, given: Collection[str], in_file: Collection[str] = ()) -> None:
    """Check the relations between the flags of a program.

    Args:
        config: the groups of flags.
        given: names of the flags that the user gave.
        in_file: names of those that only the file of ``--config`` gives.
    """
    rules, defaults = rules_of(type(config)), defaults_of(type(config))
    changed = {name for name, value in values_of(config).items() if not is_default(value, defaults[name])}
    for name in sorted(changed):
        needs = rules[name].needs.split()
        if needs and changed.isdisjoint(needs):
            raise UsageError(f"--{name} needs --{' or --'.join(needs)}: pass both")
    set_together = changed.intersection(given)
    for name in sorted(set_together):
        for other in f"{rules[name].excludes} {rules[name].replaces}".split():
            if other in set_together:
                one, two = (f"--{each}{' of --config' if each in in_file else ''}" for each in (name, other))
                raise UsageError(f"{one} and {two} exclude each other: pass one")


def flags_in(document: Flags) -> dict[str, Any]:
    """Return the flags that a document holds: those of the ``config.json`` of a run, or flags alone."""
    return dict(document["training"]) if isinstance(document.get("training"), Mapping) else dict(document)


def typed_flags(config_class: type[C], flags: Flags, source: object) -> dict[str, Any]:
    """Return flags that were read from a file, as values of their types; flags that no program has are left out.

    Raises:
        DamageError: if a value is of another type, or out of its bounds.
    """
    values = {
        name: check_document({name: flags[name]}, dict[str, kind], source)[name]  # type: ignore[valid-type]
        for name, kind in flag_types(config_class).items()
        if name in flags
    }
    try:
        checked = values_of(with_values(config_class(), values))
    except UsageError as error:
        raise DamageError(f"{source} is damaged: {error}") from error
    return {name: checked[name] for name in values}


def _from_file(config_class: type[C], path: Path, given: Collection[str]) -> dict[str, Any]:
    """Return the flags in the file of ``--config``, without those whose value is None or empty."""
    document = read_document(path, dict[str, Any])
    if not isinstance(document.get("training", {}), Mapping):
        raise DamageError(f"{path} is damaged: training must be an object with flags")
    flags = flags_in(document)
    if "training" in document:
        flags.pop("checkpoint_dir", None)  # the checkpoints of that run are not those of a new one
    unknown = sorted(flags.keys() - flag_types(config_class).keys())
    if unknown:
        raise UsageError(f"--config {path} sets flags that this program does not have: {', '.join(unknown)}")
    modules = typed_flags(config_class, {"import": flags.pop("import", [])}, path)["import"]
    if modules and "import" not in given:
        raise UsageError(f"--config {path} belongs to a run with --import {' '.join(modules)}: pass it again")
    values = typed_flags(config_class, flags, path)
    return {name: value for name, value in values.items() if value not in (None, ())}


def import_modules(modules: Sequence[str]) -> None:
    """Import the modules of ``--import``, also from the current folder."""
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # of any type, as the module is a user's
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(f"--import {name} failed ({cause}): name a module that Python can import") from error
