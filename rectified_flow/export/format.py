"""The contract of a format: which files an export writes, and how it makes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rectified_flow.system.artifact import claim
from rectified_flow.system.files import replace_file, writing
from rectified_flow.system.terminal import progress_bar

Files = Mapping[str, bytes]
"""Contents of files by their paths in the folder of an export."""
Stage = Callable[[], tuple[Files, str]]
"""Returns files, the main one first, and what the program prints about them."""


@dataclass(frozen=True)
class Export:
    """An export of a flow, checked and ready to be written.

    A format is a function that returns an ``Export``. It raises a UsageError for a flow that it cannot write::

        @register(role="format")
        def arrays(trained: Trained, *, compressed: bool = False) -> Export: ...

    ``trained`` is a :class:`rectified_flow.load.Trained`. The other parameters are options that a user sets, as in
    ``format=arrays compressed=true``.

    Args:
        names: paths of all files, so that none of them replaces a file of the user after minutes of work.
        stages: the work, by the name of what is converted.
        finish: returns the files to write, given those of all stages; by default the same files.
        notes: lines to print beside those of the stages, by name.
    """

    names: Sequence[str]
    stages: Mapping[str, Stage]
    finish: Callable[[Files], Files] = lambda files: files
    notes: Mapping[str, str] = field(default_factory=dict)


def write(export: Export, folder: Path) -> dict[str, str]:
    """Write an export into a folder that exists, and return lines about its files, by name.

    Raises:
        UsageError: if a file of the user has the name of one of the files.
        RunError: if a file cannot be written.
    """
    claim(folder, export.names)
    files: dict[str, bytes] = {}
    report = dict(export.notes)
    with progress_bar(total=len(export.stages), unit="stage", leave=False) as bar:
        for name, convert in export.stages.items():
            bar.set_description(f"converting the {name}")
            made, about = convert()
            files |= made
            report[name] = f"{folder / next(iter(made))}, {about}"
            bar.update()
    with writing(f"the export in {folder}"):
        for path, content in export.finish(files).items():
            replace_file(folder / path, content)
    return report
