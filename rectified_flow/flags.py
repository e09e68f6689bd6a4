"""Dataclasses of flags: read from a command line and a file, checked in one place, and written as plain data.

A group of flags is a frozen dataclass that derives from :class:`Flags`. Each field is a flag: its docstring is the help
text, and its annotation has the type, the bounds and, by :func:`flag`, what it needs, what it excludes, and whether it
belongs to this machine. Nothing here imports torch, and pydantic is imported only once a value differs from its
default, so that ``--help`` answers at once.
"""

import importlib
import io
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from annotated_types import Ge, Gt, Interval, Le, Lt

from rectified_flow.errors import DamageError, UsageError, first_line
from rectified_flow.registry import Role, as_plain, find, names, parameters_of
from rectified_flow.system.files import LONGEST, check_document, read_document, usable_path

C = TypeVar("C")
Positive = Annotated[int, Interval(gt=0, lt=2**53)]  # float64, as in JSON, is exact up to 2**53
Natural = Annotated[int, Interval(ge=0, lt=2**53)]
AtLeastTwo = Annotated[int, Interval(ge=2, lt=2**53)]
Seed = Annotated[int, Interval(ge=0, lt=2**32)]
PositiveNumber = Annotated[float, Interval(gt=0, le=1e30)]  # the largest float32 is 3.4e38
NonNegative = Annotated[float, Interval(ge=0, le=1e30)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Ge(0), Le(1)]
Strength = Annotated[float, Gt(0), Le(1)]
_PART = tyro.conf.arg(metavar="[NAME] [KEY=VALUE ...]")
Part = Annotated[tuple[str, ...], _PART]
"""Name of a registered class or function, and its arguments, whose values are JSON or strings."""
FORMER_FLAGS = {
    "reflow_from": "teacher",
    "reflow_pairs": "teacher_samples",
    "teacher_paths": "teacher_samples",
    "reflow_steps": "teacher_steps",
    "pairs_dir": "teacher_dir",
    "paths_dir": "teacher_dir",
}
"""Flags of commit c5b7768 that have another name now. Flags that no longer exist are left out."""
PARTS = ("autoencoder", "condition_on", "dataset", "flow", "network", "optimizer", "space", "time_distribution")
"""Flags that take arguments. Earlier, a second flag took them: ``*_options``, or the one in ``FORMER_OPTIONS``."""
FORMER_OPTIONS = {"condition_on": "condition_types", "time_distribution": "time_options"}
FORMER_SWITCHES = {"native_size": {"image_size": 0}, "skip_unpaired": {"skip_broken_images": True}}
"""Former flags, and the values of other flags that replace them."""


@dataclass(frozen=True)
class Rule:
    """The relations of a flag to other flags, in its annotation: ``Annotated[int, flag(needs="teacher")]``."""

    needs: str = ""
    """Names of flags, one of which must be set, too."""
    excludes: str = ""
    """Names of flags that must not be set, too."""
    replaces: str = ""
    """Names of recorded flags that the given flag makes meaningless."""
    local: bool = False
    """The flag describes this machine, such as the place of a folder: a student of a teacher may set it."""
    recorded: bool = True
    """``config.json`` keeps the flag."""
    for_pictures: bool = False
    """The flag is refused if the data are items of a registered dataset."""
    shapes_training: bool = False
    """A resumed run with another value trains differently, which is reported."""


flag = Rule


@dataclass(frozen=True)
class Flags:
    """A group of flags, checked when it is made."""

    def __post_init__(self) -> None:
        changed = [each for each in fields(self) if not _is_default(getattr(self, each.name), each.default)]
        hints = get_type_hints(type(self), include_extras=True) if changed else {}
        for each in changed:
            value = _validated(f"--{flag_name(each.name)}", [getattr(self, each.name)], hints[each.name])
            if _PART in getattr(hints[each.name], "__metadata__", ()) and not name_of(value):
                value = (*getattr(type(self), each.name), *value)  # arguments alone are those of the default part
            object.__setattr__(self, each.name, value)


def default_is(text: str) -> Any:
    """Annotate a flag whose default is None with the default in words for ``--help``."""
    return tyro.conf.arg(help_behavior_hint=lambda own: f"(default: {text if own in ('None', '') else own})")


def parse(config_class: type[C], description: str, arguments: Sequence[str] | None = None, *, quiet: bool = False) -> C:
    """Return the config that the command line gives, on top of the flags in the file of ``--config``.

    ``--help`` and errors exit, silently if ``quiet``. A ``program`` in the config gets the names of all given flags.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for word, value in pairwise(["", *arguments, "end"]):
        name = word if word.startswith("--") else "an argument"
        if value == "" or name.endswith("="):  # an empty path would mean the current folder
            raise UsageError(f"{name.rstrip('=')} is empty: check whether a variable is unset")
    words = (word.split("=")[0].lstrip("-").replace("-", "_") for word in arguments if word.startswith("--"))
    given = frozenset(word.removeprefix("no_") for word in words)
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
        cause: BaseException | None = end
        while cause is not None and not isinstance(cause, UsageError):  # tyro prints one of a config in a box
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        if not quiet:
            sys.stderr.write(explanation.getvalue())
        raise
    file = getattr(getattr(config, "program", None), "config", None)
    if file is not None:
        base = _from_file(config_class, file, given)
        config = based_on(base, config, given)
    check_rules(config, given)
    if file is not None:
        given |= changed_flags(base)
    if hasattr(config, "program"):
        object.__setattr__(config.program, "given", given)
    return config


def check_rules(config: Any, given: Collection[str]) -> None:
    """Check the relations between the flags of a config."""
    rules, changed = rules_of(type(config)), changed_flags(config)
    for name in sorted(changed & rules.keys()):
        needs = rules[name].needs.split()
        if needs and changed.isdisjoint(needs):
            raise UsageError(f"--{name} needs --{' or --'.join(needs)}: pass both")
    set_together = changed & set(given)
    for name in sorted(set_together):
        for other in rules[name].excludes.split():
            if other in set_together:
                raise UsageError(f"--{name} and --{other} exclude each other: pass one")


def based_on(base: C, config: C, given: Collection[str]) -> C:
    """Return ``base`` with the given flags of ``config``, and without the flags that these exclude or replace."""
    rules, values = rules_of(type(base)), values_of(config)
    known = {*given} & rules.keys()
    # A flag at its default, such as --holdout 0, excludes no other, and neither does a flag that a run does not record.
    changed = {name for name in known & changed_flags(config) if rules[name].recorded}
    reset = {other for name in known for other in rules[name].replaces.split()}
    reset |= {other for name in changed for other in rules[name].excludes.split()}
    reset |= {name for name, rule in rules.items() if changed & {*rule.excludes.split()}}
    defaults = {name: default for name, _, default in _each_flag(base) if name in reset}
    return replaced(base, defaults | {name: values[name] for name in known})


def flag_types(config_class: Any) -> dict[str, Any]:
    """Return the annotations of all flags by name, also of nested groups."""
    kinds, hints = dict[str, Any](), get_type_hints(config_class, include_extras=True)
    for each in fields(config_class):
        kind = hints[each.name]
        nested = isinstance(kind, type) and is_dataclass(kind)
        kinds |= flag_types(kind) if nested else {flag_name(each.name): kind}
    return kinds


def rules_of(config_class: Any) -> dict[str, Rule]:
    """Return the rules of all flags by name."""
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in flag_types(config_class).items()}
    return {name: next((each for each in of if isinstance(each, Rule)), Rule()) for name, of in notes.items()}


def changed_flags(config: Any) -> frozenset[str]:
    """Return the names of the flags that differ from their defaults."""
    return frozenset(name for name, value, default in _each_flag(config) if not _is_default(value, default))


def values_of(config: Any) -> dict[str, Any]:
    """Return the values of all flags by name."""
    return {name: value for name, value, _ in _each_flag(config)}


def _each_flag(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the value and the default of each flag, also of nested groups."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from _each_flag(value)
        else:
            yield flag_name(each.name), value, each.default


def replaced(config: C, flags: Mapping[str, Any]) -> C:
    """Return the config with other values of some flags, whichever of its nested configs they are in."""
    changes: dict[str, Any] = {}
    for each in fields(config):  # type: ignore[arg-type]
        value = getattr(config, each.name)
        if is_dataclass(value):
            new = replaced(value, flags)
            changes |= {} if new is value else {each.name: new}
        elif flag_name(each.name) in flags:
            changes[each.name] = flags[flag_name(each.name)]
    return replace(config, **changes) if changes else config  # type: ignore[type-var]


def plain(config: Any, *, paths: bool = True) -> dict[str, Any]:
    """Return all flags by name, also those of nested configs, as JSON and trackers can hold them."""
    values = values_of(config).items()
    return {name: as_plain(value, name) for name, value in values if paths or not isinstance(value, Path)}


def flags_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags by name that a document holds: a file of flags, or the ``config.json`` of a run.

    It is ``{data, flow, training}``; ``{run, flags}``, as commit c5b7768 wrote it; or flags alone.
    """
    if "training" in document:
        flags = _flat(document.get("data", {})) | document["training"]
    elif {"run", "flags"} & document.keys():
        former = {**document.get("data", {}), **document.get("run", {}), **document.get("flags", {})}
        flags = {FORMER_FLAGS.get(name, name): value for name, value in former.items() if value is not None}
        flags |= {} if flags.pop("use_ema", True) else {"ema_decay": 0.0}
    else:
        flags = dict(document)
    for part in PARTS:
        values = flags.get(part) or [], flags.pop(FORMER_OPTIONS.get(part, f"{part}_options"), [])
        if part in flags or values[1]:
            flags[part] = [word for each in values for word in (each if isinstance(each, list) else [each])]
    for switch, now in FORMER_SWITCHES.items():
        flags |= now if flags.pop(switch, False) else {}
    return flags


def _flat(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in a description of nested groups of flags."""
    flags: dict[str, Any] = {}
    for name, value in block.items():
        flags |= _flat(value) if isinstance(value, Mapping) else {name: value}
    flags.pop("kind", None)
    return flags


def recorded(config: Any) -> dict[str, Any]:
    """Return the flags that a run's ``config.json`` keeps, to start the run again."""
    rules = rules_of(type(config))
    return {name: value for name, value in plain(config).items() if rules[name].recorded}


def config_from(config_class: type[C], flags: Mapping[str, Any], source: object) -> C:
    """Return the config of flags that were read from a file."""
    values = {
        name: check_document({name: flags[name]}, dict[str, kind], source)[name]  # type: ignore[valid-type]
        for name, kind in flag_types(config_class).items()
        if name in flags
    }
    try:
        return replaced(config_class(), values)
    except UsageError as error:
        raise DamageError(f"{source} is damaged: {error}") from error


def refuse(flags: Mapping[str, object], reason: str) -> None:
    """Raise a UsageError for the first flag with a value that is true; ``reason`` ends its sentence."""
    for name, value in flags.items():
        if value:
            raise UsageError(f"--{name} {reason}")


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


def flag_name(field: str) -> str:
    """Return the flag of a field: ``import`` for ``import_``, which Python reserves."""
    return field.removesuffix("_")


def _validated(name: str, candidates: Sequence[Any], hint: Any) -> Any:
    """Return the first candidate that fits the annotation ``hint``, as a value of its type."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    # In a tuple, as pydantic takes no rules for a dataclass alone.
    adapter = TypeAdapter(tuple[hint], config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))
    for candidate in candidates:
        try:
            [value] = adapter.validate_python((candidate,))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
        else:
            return usable_path(name, value) if isinstance(value, Path) else value
    requirement = problem["msg"].partition(" should ")[2] or problem["msg"]
    raise UsageError(f"{name} is {str(problem['input'])[:LONGEST]}; it must {requirement}")


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default  # as True == 1


def _from_file(config_class: type[C], path: Path, given: Collection[str]) -> C:
    """Return the config in the file of ``--config``: flags by name, or the ``config.json`` of a run."""
    flags = flags_in(read_document(path, dict[str, Any]))
    unknown = sorted(flags.keys() - flag_types(config_class).keys())
    refuse({f"config {path}": unknown}, f"sets flags that this program does not have: {', '.join(unknown)}")
    modules = flags.pop("import", None)
    if modules and "import" not in given:
        raise UsageError(f"--config {path} belongs to a run with --import {' '.join(modules)}: pass it again")
    return config_from(config_class, flags, path)


def import_modules(modules: Sequence[str]) -> None:
    """Import the modules of ``--import``, also from the current folder."""
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # of any type, as the module is a user's
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(f"--import {name} failed ({cause}): name a module that Python can import") from error


@dataclass(frozen=True)
class Choice:
    """A registered class or function with the arguments that flags give it.

    Args:
        flag: the flag that names it, such as ``network``.
        target: the class or function.
        arguments: checked arguments.
    """

    flag: str
    target: Any
    arguments: Mapping[str, Any]

    def build(self, **context: Any) -> Any:
        """Call the target with its arguments, and those of ``context`` that it has a parameter for."""
        parameters = parameters_of(self.target)
        arguments = {name: value for name, value in context.items() if name in parameters} | dict(self.arguments)
        try:
            return self.target(**arguments)
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            name = self.target.__qualname__.removesuffix(".of")
            raise UsageError(f"--{self.flag} {name} cannot be built ({first_line(error)})") from error


def split_part(part: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a part, which is empty if only arguments are given, and its arguments."""
    words = [part] if isinstance(part, str) else [*part]
    is_named = bool(words) and not re.match(r"[^\W\d]\w*=", words[0])  # paths and hub ids may contain =
    return (words[0], words[1:]) if is_named else ("", words)


def name_of(part: Sequence[str]) -> str:
    """Return the name of a part, which is empty if only arguments are given."""
    return split_part(part)[0]


def choose(flag: str, role: Role | type, part: Sequence[str], but: type | None = None) -> Choice:
    """Return a registered class or function with its arguments."""
    name, options = split_part(part)
    target = find(flag, role, name or " ".join(options), but)
    return Choice(flag, target, typed_options(flag, target, options))


def typed_options(flag: str, target: Any, options: Sequence[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` options with the types that the parameters of ``target`` are annotated with."""
    parameters, typed = parameters_of(target), {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or key not in parameters:
            known, name = ", ".join(parameters) or "none", target.__qualname__.removesuffix(".of")
            raise UsageError(f"--{flag} {option}: {name} takes KEY=VALUE with the keys {known}")
        candidates = [text]
        with suppress(ValueError, RecursionError):  # a number of more than 4,300 digits, and brackets in brackets
            candidates = [json.loads(text), text]
        typed[key] = _validated(f"--{flag} {key}", candidates, parameters[key].annotation)
    return typed


def choose_named(flag: str, base: type, text: str) -> Any:
    """Return the object of ``NAME`` or ``NAME:VALUE``, with the value of the constructor's first argument."""
    name, colon, value = text.partition(":")
    known = {each.lower(): each for each in names(base)}
    target = find(flag, base, known.get(name.lower(), name))
    options = [f"{next(iter(parameters_of(target)), name)}={value}"] if colon else []
    return Choice(flag, target, typed_options(flag, target, options)).build()


def arguments_from(group: Flags, names: Iterable[str], target: Any) -> dict[str, Any]:
    """Return those of the named flags that differ from their defaults, as arguments for ``target``."""
    values = {name: getattr(group, name) for name in names}
    given = {name: value for name, value in values.items() if value != getattr(type(group), name)}
    for name in given.keys() - parameters_of(target).keys():
        raise UsageError(f"--{name} has no effect: {target.__name__} has no argument {name}; leave it out")
    return given
