"""The studio: a page in the browser for all steps of a run. Optional: no other folder imports it."""

from pathlib import Path


def launch(folder: str | Path = "runs", *, inline: bool = True) -> None:
    """Open the studio from Python, for example in a cell of Jupyter or Colab; the page is served until Python ends.

    Args:
        folder: folder of the runs, in which the studio writes.
        inline: show the page below the cell. Otherwise, its address is printed.
    """
    from rectified_flow.studio.flags import PageConfig
    from rectified_flow.studio.serve import open_page

    open_page(PageConfig(Path(folder), open=False), inline=inline)
