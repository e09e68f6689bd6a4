"""Line plots in a common style, as PNG files."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from rectified_flow.files import replace_file

Line = tuple[Any, Any]
"""The x and the y coordinates of the points, as sequences or arrays."""


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
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label, title=title)
    for name, (x, y) in lines.items():
        axes.plot(x, y, label=name, marker="." if len(x) < 40 else None)
    if log_x:
        axes.set_xscale("log", base=2)
        points = sorted({float(value) for x, _ in lines.values() for value in x})
        axes.set_xticks(points, [f"{point:g}" for point in points])
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    if len(lines) > 1:
        axes.legend()
    axes.grid(alpha=0.3, which="both")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    replace_file(path, content.getvalue())
    return path
