"""The flags of ``rectified-flow studio``. Imports no slow package, so that its help starts fast."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Interval

from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.flags import Flags, default_is, flag

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class PageConfig(Flags):
    """The page."""

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of the runs. The studio writes in this folder only."""
    port: Annotated[int | None, Interval(gt=0, lt=2**16), default_is("the first free one from 7860")] = None
    """Port of the page on this machine."""
    host: Annotated[str, flag(needs="password")] = LOCALHOST
    """Address of this machine to listen on, if other machines may open the page; it needs a password."""
    password: Annotated[str | None, default_is("none")] = None
    """Password of the page. The user name is studio."""
    open: bool = True
    """Open the page in a browser."""


@dataclass(frozen=True)
class StudioConfig:
    """All flags of the studio."""

    page: PageConfig = field(default_factory=PageConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)
