"""Groups of flags: what a flag says of itself, where it is declared.

A group is a frozen dataclass that derives from :class:`Flags`. Each field is a flag: its docstring is the help text,
and its annotation has the type, the bounds and, by :func:`flag`, what it needs, what it excludes, and whether it
belongs to this machine. Nothing here imports torch, and pydantic is imported only once a value differs from its
default, so that a program prints its help at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, TypeVar, get_type_hints

import tyro
from annotated_types import Ge, Interval, Le, Lt

from rectified_flow.errors import quoted
from rectified_flow.parts import name_of, validated
from rectified_flow.registry import Document, as_plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")
Positive = Annotated[int, Interval(gt=0, lt=2**53)]  # float64, as in JSON, is exact up to 2**53
Natural = Annotated[int, Interval(ge=0, lt=2**53)]
AtLeastTwo = Annotated[int, Interval(ge=2, lt=2**53)]
Seed = Annotated[int, Interval(ge=0, lt=2**32)]
PositiveNumber = Annotated[float, Interval(gt=0, le=1e30)]  # the largest float32 is 3.4e38
NonNegative = Annotated[float, Interval(ge=0, le=1e30)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Ge(0), Le(1)]
_PART = tyro.conf.arg(metavar="[NAME] [KEY=VALUE ...]")
Part = Annotated[tuple[str, ...], _PART]
"""Name of a registered class or function, and its arguments, whose values are JSON or strings."""


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
    """The flag describes this machine, such as the place of a folder, whose path becomes absolute: a student of a
    teacher may set it."""
    recorded: bool = True
    """``config.json`` keeps the flag."""
    for_pictures: bool = False
    """The flag is refused if the data are items of a registered dataset."""
    shapes_training: bool = False
    """A resumed run with another value trains differently, which is reported; for flags of ``TrainingConfig`` only."""
    choice: str = ""
    """The choice that this flag and others make together: a plan sets none of them if one is given."""
    stands_for: str = ""
    """Name of the argument in messages, if it differs from the name of the flag."""
    fixes_size: bool = False
    """A plan does not choose the size of the pictures if the flag is given."""


flag = Rule
"""A rule, as annotations write it."""


@dataclass(frozen=True)
class Flags:
    """A group of flags, checked when it is made."""

    def __post_init__(self) -> None:
        changed = [each for each in fields(self) if not is_default(getattr(self, each.name), each.default)]
        hints = _hints(type(self)) if changed else {}
        for each in changed:
            value = validated(quoted(flag_name(each.name)), [getattr(self, each.name)], hints[each.name])
            notes = getattr(hints[each.name], "__metadata__", ())
            if isinstance(value, Path) and any(isinstance(note, Rule) and note.local for note in notes):
                value = value.absolute()
            if _PART in notes and not name_of(value):
                value = (*getattr(type(self), each.name), *value)  # arguments alone are those of the default part
            object.__setattr__(self, each.name, value)


_hints: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""Returns the annotations of a class by name; evaluating them takes some milliseconds."""


def default_is(text: str) -> object:
    """Annotate a flag whose default is None with the default in words for the help."""
    return tyro.conf.arg(help_behavior_hint=lambda own: f"(default: {text if own in ('None', '') else own})")


def flag_types(config_class: "type[DataclassInstance]") -> Mapping[str, object]:
    """Return the annotations of all flags by name, also of nested groups."""
    kinds, hints = dict[str, object](), _hints(config_class)
    for each in fields(config_class):
        kind = hints[each.name]
        nested = isinstance(kind, type) and is_dataclass(kind)
        kinds |= flag_types(kind) if nested else {flag_name(each.name): kind}
    return kinds


def rules_of(config_class: "type[DataclassInstance]") -> Mapping[str, Rule]:
    """Return the rules of all flags by name."""
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in flag_types(config_class).items()}
    return {name: next((each for each in of if isinstance(each, Rule)), Rule()) for name, of in notes.items()}


def is_group(value: object) -> "TypeGuard[DataclassInstance]":
    """Return whether the value of a field is a nested group of flags."""
    return is_dataclass(value) and not isinstance(value, type)


def values_of(config: "DataclassInstance") -> dict[str, object]:
    """Return the values of all flags by name, also of nested groups."""
    values: dict[str, object] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        values |= values_of(value) if is_group(value) else {flag_name(each.name): value}
    return values


def defaults_of(config_class: "type[DataclassInstance]") -> Mapping[str, object]:
    """Return the defaults of all flags by name, as their groups declare them."""
    defaults, hints = dict[str, object](), _hints(config_class)
    for each in fields(config_class):
        kind = hints[each.name]
        nested = isinstance(kind, type) and is_dataclass(kind)
        defaults |= defaults_of(kind) if nested else {flag_name(each.name): each.default}
    return defaults


def with_values(config: C, values: Mapping[str, object]) -> C:
    """Return the groups of flags with these values by name, which are checked again."""
    changes: dict[str, object] = {}
    for each in fields(config):
        group = getattr(config, each.name)
        if is_group(group):
            changes[each.name] = with_values(group, values)
        elif flag_name(each.name) in values:
            changes[each.name] = values[flag_name(each.name)]
    return replace(config, **changes)


def plain(config: "DataclassInstance", *, paths: bool = True) -> Document:
    """Return all flags by name, also those of nested configs, as JSON and trackers can hold them."""
    values = values_of(config).items()
    return {name: as_plain(value, name) for name, value in values if paths or not isinstance(value, Path)}


def flag_of(config_class: "type[DataclassInstance]", argument: str) -> str | None:
    """Return the name of the flag for an argument that a message names; None if the program has none."""
    rules = rules_of(config_class)
    return next((name for name, rule in rules.items() if argument in (name, rule.stands_for)), None)


def recorded(config: "DataclassInstance") -> Document:
    """Return the flags that a run's ``config.json`` keeps, to start the run again."""
    rules = rules_of(type(config))
    return {name: value for name, value in plain(config).items() if rules[name].recorded}


def flag_name(field: str) -> str:
    """Return the flag of a field: ``import`` for ``import_``, which Python reserves."""
    return field.removesuffix("_")


def is_default(value: object, default: object) -> bool:
    """Return whether a value is the default of its flag, of the same type."""
    return type(value) is type(default) and value == default  # as True == 1
