"""From the command line to a config, one group of ``--help`` for each of the config's groups of flags."""

import re
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

import tyro

C = TypeVar("C")


def parse(config_class: type[C], description: str, *, quiet: bool = False) -> C:
    """Read the command line into ``config_class``; ``--help`` and errors exit, silently if ``quiet``.

    Raises:
        UsageError: if the values make no valid config.
    """
    groups = {
        re.sub("(?<!^)(?=[A-Z])", "_", base.__name__.removesuffix("Flags")).lower(): base
        for base in reversed(config_class.__mro__)
        if base.__name__.endswith("Flags")
    }
    grouped = make_dataclass(
        "Flags", [(title, group, field(default_factory=group)) for title, group in groups.items()], frozen=True
    )
    grouped.__doc__ = description
    flags: Any = tyro.cli(
        grouped,
        config=(tyro.conf.OmitArgPrefixes,),
        use_underscores=True,
        console_outputs=not quiet,
    )
    values: dict[str, Any] = {}
    for title, group in groups.items():
        values |= {each.name: getattr(getattr(flags, title), each.name) for each in fields(group)}
    return config_class(**values)
