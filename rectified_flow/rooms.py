"""The list of the optional folders of the package, whose modules register a kind of data or of condition.

No other module imports these folders. The programs and the library work without any one of them: delete its folder.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

ROOMS = ("rectified_flow.latents", "rectified_flow.measurements", "rectified_flow.text")


@cache
def import_rooms() -> None:
    """Import the folders that exist, which register their classes."""
    for room in ROOMS:
        if find_spec(room) is not None:
            import_module(room)
