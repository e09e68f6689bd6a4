"""Write a trained flow as a program for other software, or as a web page that samples in a browser."""

import signal
from os.path import lexists
from pathlib import Path
from shlex import quote

from rectified_flow.cli.build import prepare_parts
from rectified_flow.cli.model_flags import ExportConfig
from rectified_flow.errors import UsageError
from rectified_flow.export.format import write
from rectified_flow.export.web_page import INDEX
from rectified_flow.load import read_trained
from rectified_flow.parts import arguments_from, choose
from rectified_flow.runs import checkpoint
from rectified_flow.system.artifact import claimed_names
from rectified_flow.system.files import prepare_folder
from rectified_flow.system.serving import browser_with_window, serving
from rectified_flow.system.terminal import lines


def export(config: ExportConfig) -> None:
    """Write a checkpoint in the format of the flags."""
    flags = config.model
    choice = choose("format", "format", flags.format)
    options = arguments_from(flags, ("half", "metadata"), choice.target) | dict(choice.arguments)
    trained = read_trained(checkpoint.resolve(flags.checkpoint), flags.checkpoint)
    prepare_parts(trained, flags, trained.flow.device)
    exported = choice.target(trained, **options)
    if flags.open and INDEX not in exported.names:
        raise UsageError(f"--open has no effect: the format {choice.target.__name__} has no page to open; leave it out")
    folder = prepare_folder("output_dir", flags.output_dir or trained.run_folder / "exported")
    there = {name for name in claimed_names(folder) if lexists(folder / name)}
    if INDEX in there - {*exported.names} and there & {*exported.names}:
        keeps = "holds an exported page, whose files another format would replace"
        raise UsageError(f"--output_dir {folder} {keeps}: pass another folder, or remove this one")
    report: dict[str, object] = {"model": trained, **write(exported, folder)}
    if INDEX in exported.names:
        report["page"] = f"{folder / INDEX}, to be served: python -m http.server --directory {quote(str(folder))}"
    print(lines(report), flush=True)
    if flags.open:
        _open(folder)


def _open(folder: Path) -> None:
    """Serve the page in a folder until Ctrl-C, and open it in a browser."""
    with serving(folder) as address:
        print(lines({"server": f"{address} until Ctrl-C"}), flush=True)
        if browser := browser_with_window():
            browser.open(address)
        signal.pause()
