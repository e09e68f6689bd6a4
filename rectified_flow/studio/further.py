"""The flags of the training program as fields of the page, grouped and explained as in its help."""

import inspect
import re
from shlex import split
from typing import Literal, get_args, get_origin, get_type_hints

import gradio as gr

from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.errors import UsageError

ELSEWHERE = (
    *("dataset", "dataset_path", "output_dir", "budget", "one_step", "dry_run", "degrade", "source_path", "resume"),
    *("condition_on", "use_cfg", "resume_from_checkpoint", "config", "import_"),
)
"""Flags that other parts of the page set."""
FILLED = {"skip_broken_images": "yes"}
"""Values of fields that are not empty at first: a person who drops pictures cannot remove a broken one on the page."""
YES = {"yes": True, "no": False}
"""Values of a flag that is on or off."""
HELP = re.compile(r'^    ([a-z]\w*):.+?^    """(.+?)"""', re.DOTALL | re.MULTILINE)
"""A flag in the code of its group, and the docstring below it."""


def further_fields() -> dict[str, gr.components.Component]:
    """Make a folded field for each flag, and return them by flag. An empty field leaves the choice to the program."""
    made = dict[str, gr.components.Component]()
    with gr.Accordion("Further settings", open=False, elem_id="further"):
        gr.HTML("Empty fields are set automatically.")
        for group in get_type_hints(TrainConfig).values():
            helps = dict(HELP.findall(inspect.getsource(group)))
            with gr.Accordion(str(group.__doc__).partition("\n")[0].rstrip("."), open=False):
                for name, kind in get_type_hints(group).items():
                    if name not in ELSEWHERE:
                        made[name] = field_of(name, kind, " ".join(helps[name].split()))
    return made


def field_of(name: str, kind: object, text: str) -> gr.components.Component:
    """Return the field of a flag: a menu if its type has few values."""
    parts = (kind, *get_args(kind))
    choices = [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]
    choices += YES if bool in parts else ()
    words = {"label": name.replace("_", " "), "info": text, "elem_id": f"set-{name}"}
    words["value"] = FILLED.get(name, "")
    return gr.Dropdown(["", *choices], **words) if choices else gr.Textbox(**words)


def value_of(field: gr.components.Component, text: str) -> bool | str | list[str]:
    """Return the value of a flag from the text of its field: a choice of the menu, or words as a shell takes them."""
    if isinstance(field, gr.Dropdown):
        return YES.get(text, text) if ("yes", "yes") in field.choices else text
    try:
        return split(text)
    except ValueError as error:
        sentence = f"{field.label} {text} cannot be read ({str(error).lower()})"
        raise UsageError(f"{sentence}: write the text between double quotation marks") from error
