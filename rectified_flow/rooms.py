"""The list of the optional folders of the package, whose modules register a kind of data or of condition.

No other module imports these folders. The programs and the library work without any one of them: delete its folder.
"""

from functools import cache
from importlib import import_module
from pathlib import Path

ROOMS = ("rectified_flow.latents", "rectified_flow.measurements", "rectified_flow.text")


@cache
def import_rooms() -> None:
    """Import the folders that exist, which register their classes."""
    for room in ROOMS:
        # find_spec would also find the folder of another copy of the package, if that one is installed as editable
        if (Path(__file__).parent / room.rpartition(".")[2] / "__init__.py").exists():
            import_module(room)
