"""How a dataclass becomes flags: one dataclass a group, its docstrings the help, and plain data again.

Nothing here or in a module of flags imports torch, so that ``--help`` and a mistyped flag answer at once.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import tyro


def default_is(text: str) -> Any:
    """Annotate a flag whose default is None with the default that a person should read."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})")


def plain(config: Any) -> dict[str, Any]:
    """All flags of a config by name, also of configs nested in it, as JSON and trackers can hold them."""
    values: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        values |= plain(value) if is_dataclass(value) else {flag_name(each.name): _plain(value)}
    return values


def names(config_class: type) -> list[str]:
    """The names of all flags of a config, also of configs nested in it."""
    types = get_type_hints(config_class)
    return [
        name
        for each in fields(config_class)
        for name in (names(types[each.name]) if is_dataclass(types[each.name]) else [flag_name(each.name)])
    ]


def flag_name(field: str) -> str:
    """The flag of a field: ``import`` for ``import_``, which Python reserves."""
    return field.removesuffix("_")


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """The words that set these flags on a command line; None and empty lists leave a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
