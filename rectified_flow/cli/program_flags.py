"""The flags of every program, and a check of the folders in flags. Imports no torch, so that ``--help`` starts fast."""

from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Annotated

import tyro

from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, flag


@dataclass(frozen=True)
class ProgramConfig(Flags):
    """Flags that every program has."""

    import_: Annotated[
        tuple[str, ...], flag(local=True), tyro.conf.arg(name="import", help_behavior_hint="(default: none)")
    ] = ()
    """Python modules to import first, which register networks, flows, datasets or other parts of your own."""


def check_outside(flag: str, data: Path | None, **folders: Path | None) -> None:
    """Raise a UsageError if one of the folders lies in the folder of data that a flag names.

    It may lie in a hidden folder there, such as the cache in a home folder, since no data are read from these.
    """
    for name, folder in folders.items():
        if data is not None and folder is not None and Path(realpath(folder)).is_relative_to(realpath(data)):
            inside = Path(realpath(folder)).relative_to(realpath(data))
            if not any(part.startswith(".") for part in inside.parts):
                raise UsageError(f"--{name} {folder} lies inside --{flag} {data}: choose a folder outside")
