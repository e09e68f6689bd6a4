"""The words of the program's commands, from what a person chose on the page."""

import re
from collections.abc import Sequence
from pathlib import Path

from rectified_flow.cli.settings import command_line
from rectified_flow.errors import UsageError
from rectified_flow.registry import Document
from rectified_flow.studio.runs import Run
from rectified_flow.system.files import usable_path

DRAWN_FLOWERS = "drawn flowers"
"""Value of the folder field for the drawn flowers."""
FLOWERS: Document = {
    "dataset": "synthetic-flowers",
    "image_size": 128,
    "autoencoder": "small",
    "init_from": "starter",
    "max_train_samples": 1500,
}
"""Flags of the drawn flowers, as ``make demo`` trains on them."""
NAME = re.compile(r"[\w-][\w .-]{0,59}")
LENGTHS = {"train_num_steps", "num_epochs"}
"""Flags that give the length of a run in place of its time."""


def run_name(text: str) -> str:
    """Return the name of a run, which becomes the name of its folder."""
    name = text.strip()
    if not NAME.fullmatch(name):
        raise UsageError("The name may have letters, digits, spaces, dots, - and _, and at most 60 of them.")
    return name


def data_flags(folder: str) -> Document:
    """Return the flags of the pictures in a folder, or of drawn flowers."""
    return FLOWERS if folder == DRAWN_FLOWERS else {"dataset_path": folder_path(folder)}


def folder_path(text: str) -> Path:
    """Return the absolute path of a folder on this machine."""
    path = usable_path("folder", Path(text.strip())).absolute()
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder on this machine.")
    return path


def train(run: Path, data: Document, minutes: float, further: Document) -> list[str]:
    """Return the words that train a run on pictures for some minutes, unless a further setting gives its length."""
    time = {} if LENGTHS.intersection(further) else {"budget": f"{minutes:g}m"}
    return ["train", *command_line({**data, **time, **further, "output_dir": run})]


def look(words: Sequence[str]) -> list[str]:
    """Return the words that print the plan of a training."""
    return [words[0], *command_line({"dry_run": True}), *words[1:]]


def looked_at(words: Sequence[str], name: str) -> list[str]:
    """Return the words of the training that a look is about, under a name."""
    return [words[0], *words[2:-1], str(Path(words[-1]).parent / name)]


def resume(run: Run, flags: Document | None = None) -> list[str]:
    """Return the words that continue a run, which has recorded its flags, with other values of some."""
    # The program checks these before it reads what the run has recorded.
    kept = {name: run.flags.get(name) for name in ("method", "teacher")}
    return ["train", *command_line({**kept, **(flags or {}), "output_dir": run.folder})]


def extend(run: Run, minutes: float) -> list[str]:
    """Return the words that train a finished run for some more minutes, at the speed of its last steps."""
    if not run.status.get("step_time"):
        raise UsageError("This run is too short to know its speed; start it again with more time.")
    steps = max(1, round(60 * minutes / run.status["step_time"]))
    return resume(run, {"train_num_steps": run.status["total_steps"] + steps})


def draw(run: Run, conditions: Document, flags: Document) -> list[str]:
    """Return the words that sample pictures with some values of the conditions; empty ones are not given."""
    given = {name: value for name, value in conditions.items() if value not in ("", None)}
    captions = [given.pop(name) for name, kind in run.controls.items() if "encoder" in kind and name in given]
    chosen = {"set": [f"{name}={value}" for name, value in given.items()], "prompt": next(iter(captions), None)}
    return ["sample", *command_line({"checkpoint": run.folder, **chosen, **flags})]


def take(run: Path, form: str) -> list[str]:
    """Return the words that write a generator in a form, in a folder of that name: page, onnx or diffusers."""
    if form == "diffusers":
        return ["sample", *command_line({"checkpoint": run, "num_samples": 16, "save_pretrained": run / form})]
    return ["export", *command_line({"checkpoint": run, "format": form, "output_dir": run / form})]


def publish(folder: Path, form: str, name: str) -> list[list[str]]:
    """Return the commands that upload a page or a folder for diffusers to the Hugging Face Hub; none for ONNX."""
    repository = f"YOUR_NAME/{re.sub('[ /]', '-', name)}"
    upload = ["hf", "upload", repository, str(folder)]
    if form == "page":
        create = ["hf", "repos", "create", repository, *command_line({"repo-type": "space", "space-sdk": "static"})]
        return [create, [*upload, *command_line({"repo-type": "space", "exclude": "*.manifest.*"})]]
    return [upload] if form == "diffusers" else []
