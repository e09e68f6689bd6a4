"""Line plots in a common style, as PNG files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from rectified_flow.files import replace_file

Line = tuple[Any, Any]
"""The x and the y coordinates of the points, as sequences or arrays."""


@dataclass(frozen=True)
class Panel:
    """Named lines in one coordinate system."""

    lines: Mapping[str, Line]
    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False


def draw_lines(
    path: Path,
    lines: Mapping[str, Line],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> Path:
    """Plot the named ``lines`` into the PNG file ``path``, and return ``path``.

    Raises:
        OSError: if the file cannot be written.
    """
    return draw_panels(path, [Panel(lines, title, x_label, y_label, log_x, log_y)])


def draw_panels(path: Path, panels: Sequence[Panel]) -> Path:
    """Plot panels one below the other into the PNG file ``path``, and return ``path``.

    Raises:
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 0.5 + 4 * len(panels)), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(len(panels), 1, number), panel)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    replace_file(path, content.getvalue())
    return path


def _draw(axes: Any, panel: Panel) -> None:
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
    for name, (x, y) in panel.lines.items():
        axes.plot(x, y, label=name, marker="." if len(x) < 40 else None)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        points = sorted({float(value) for x, _ in panel.lines.values() for value in x})
        axes.set_xticks(points, [f"{point:g}" for point in points])
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    if len(panel.lines) > 1:
        axes.legend()
    axes.grid(alpha=0.3, which="both")
