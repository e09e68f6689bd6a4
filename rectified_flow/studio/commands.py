"""The words of the program's commands, from what a person chose on the page."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rectified_flow.cli.settings import command_line
from rectified_flow.errors import UsageError
from rectified_flow.studio.jobs import Job
from rectified_flow.studio.runs import ONE_STEP, RunFolder
from rectified_flow.system.files import usable_path

FLOWERS: Mapping[str, object] = {
    "dataset": "synthetic-flowers",
    "image_size": 128,
    "autoencoder": "small",
    "init_from": "starter",
    "max_train_samples": 1500,
}
"""The first visit: drawn flowers, as ``make demo`` trains on them."""
NAME = re.compile(r"[\w-][\w .-]{0,59}")
LEAST_MINUTES, MOST_MINUTES = 3, 12 * 60
LENGTHS = {"train_num_steps", "num_epochs"}
"""Flags that give the length of a run in place of its time."""
Values = Mapping[str, object]


def run_name(text: str) -> str:
    """Return the name of a run, which becomes the name of its folder."""
    name = text.strip()
    if not NAME.fullmatch(name):
        raise UsageError("The name may have letters, digits, spaces, dots, - and _, and at most 60 of them.")
    return name


def data_flags(folder: str) -> Values:
    """Return the flags of the pictures in a folder, or of drawn flowers if no folder is named."""
    if not folder.strip():
        return FLOWERS
    return {"dataset_path": folder_path(folder)}


def folder_path(text: str) -> Path:
    """Return the path of a folder on this machine."""
    path = usable_path("folder", Path(text.strip()))
    if not text.strip() or not path.is_dir():
        raise UsageError(f"{text.strip() or 'An empty name'} is not a folder on this machine.")
    return path


def train(run: Path, data: Values, minutes: float, further: Values) -> list[str]:
    """Return the words that train a run on pictures for some minutes, unless a further setting gives its length."""
    time = {} if LENGTHS.intersection(further) else {"budget": f"{minutes:g}m"}
    return ["train", *command_line({**data, **time, **further, "output_dir": run})]


def look(words: Sequence[str]) -> list[str]:
    """Return the words that print the plan of a training."""
    return [*words, *command_line({"dry_run": True})]


def seconds_of(job: Job, wait: float) -> float | None:
    """Return the seconds until a training is ready that begins after a wait; None if a setting gives its length."""
    choices = job.command.choices
    return None if any(choices.get(name) for name in LENGTHS) else wait + 60 * float(str(choices["minutes"]))


def without_look(job: Job, name: str) -> list[str]:
    """Return the words of the training that a look is about, under a name."""
    *words, folder, _ = job.command.words
    return [*words, str(Path(folder).with_name(name))]


def resume(run: RunFolder) -> list[str]:
    """Return the words that continue an interrupted run: it has recorded its other flags."""
    return ["train", *command_line({"output_dir": run.folder, "method": run.flags.get("method")})]


def extend(run: RunFolder, minutes: float) -> list[str]:
    """Return the words that train a finished run for some more minutes, at the speed of its last steps."""
    if not run.step_time:
        raise UsageError("This run is too short to know its speed; start it again with more time.")
    steps = run.total + max(1, round(60 * minutes / run.step_time))
    return [*resume(run), *command_line({"train_num_steps": steps})]


def draw(run: RunFolder, conditions: Mapping[str, str], flags: Values) -> list[str]:
    """Return the words that sample pictures with some values of the conditions."""
    captions = {control.name for control in run.controls if control.examples}
    prompt = next((text for name, text in conditions.items() if name in captions and text), None)
    chosen = [f"{name}={text}" for name, text in conditions.items() if text and name not in captions]
    return ["sample", *command_line({"checkpoint": run.folder, "set": chosen, "prompt": prompt, **flags})]


TAKEN: Mapping[str, str] = {"page": "exported", "onnx": "onnx", "diffusers": "diffusers"}
"""Folders of the exported forms of a generator, in the folder of its run."""


def take(run: RunFolder, form: str) -> list[str]:
    """Return the words that write a generator in a form of :data:`TAKEN`."""
    place = run.folder / TAKEN[form]
    if form == "diffusers":
        return ["sample", *command_line({"checkpoint": run.folder, "num_samples": 16, "save_pretrained": place})]
    return ["export", *command_line({"checkpoint": run.folder, "format": form, "output_dir": place})]


def publish(run: RunFolder, form: str) -> list[list[str]]:
    """Return the commands that upload a page or a folder for diffusers to the Hugging Face Hub; none for ONNX."""
    name = run.folder.parent.name if run.folder.name == ONE_STEP else run.folder.name
    repository = f"YOUR_NAME/{name.replace(' ', '-')}"
    upload = ["hf", "upload", repository, str(run.folder / TAKEN[form])]
    if form == "diffusers":
        return [upload]
    if form != "page":
        return []
    create = ["hf", "repos", "create", repository, *command_line({"repo-type": "space", "space-sdk": "static"})]
    return [create, [*upload, *command_line({"repo-type": "space", "exclude": "*.manifest.*"})]]


def label(runs: Path, folder: Path) -> str:
    """Return the name of a run on the page."""
    name = folder.relative_to(runs)
    return f"{name.parent}, in one step" if name.name == ONE_STEP else str(name)
