"""How a dataclass becomes flags: one dataclass a group, its docstrings the help, and plain data again.

Nothing here or in a module of flags imports torch, so that ``--help`` and a mistyped flag answer at once.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from rectified_flow.system.files import check_document, usable_path


def default_is(text: str) -> Any:
    """Annotate a flag whose default is None with the default that a person should read."""
    return tyro.conf.arg(help_behavior_hint=lambda own: f"(default: {text if own in ('None', '') else own})")


def plain(config: Any, *, paths: bool = True) -> dict[str, Any]:
    """All flags of a config by name, also of configs nested in it, as JSON and trackers can hold them.

    Args:
        config: a dataclass of flags.
        paths: also those that are set to a path.
    """
    values: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            values |= plain(value, paths=paths)
        elif paths or not isinstance(value, Path):
            values[flag_name(each.name)] = _plain(value)
    return values


def names(config_class: type) -> list[str]:
    """The names of all flags of a config, also of configs nested in it."""
    return list(_types(config_class))


def checked(config_class: type, flags: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Flags that were read back from a file, with the types of the fields that they set.

    Args:
        config_class: the config, whose nested ones have fields too.
        flags: as :func:`plain` made them; those that the config does not have are left out.
        source: what an error names.

    Raises:
        DamageError: if one has another type.
    """
    return {
        name: check_document({name: flags[name]}, dict[str, kind], source)[name]  # type: ignore[valid-type]
        for name, kind in _types(config_class).items()
        if name in flags
    }


def _types(config_class: Any) -> dict[str, Any]:
    """The types of all flags by name."""
    kinds: dict[str, Any] = {}
    hints = get_type_hints(config_class)
    for each in fields(config_class):
        kind = hints[each.name]
        kinds |= _types(kind) if is_dataclass(kind) else {flag_name(each.name): kind}
    return kinds


def flag_name(field: str) -> str:
    """The flag of a field: ``import`` for ``import_``, which Python reserves."""
    return field.removesuffix("_")


def check_paths(config: object) -> None:
    """Expand ``~`` in the flags of this dataclass that are paths.

    Raises:
        UsageError: if one is none that may exist, see :func:`rectified_flow.system.files.usable_path`.
    """
    for each in fields(config):  # type: ignore[arg-type]
        value = getattr(config, each.name)
        if isinstance(value, Path):
            object.__setattr__(config, each.name, usable_path(f"--{flag_name(each.name)}", value))


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
