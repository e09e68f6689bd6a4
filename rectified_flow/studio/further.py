"""The flags of the training program as fields of the page, grouped and explained as in its help."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from shlex import split
from textwrap import dedent
from typing import Literal, get_args, get_origin, get_type_hints

import gradio as gr

from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.errors import UsageError

ELSEWHERE = {
    "dataset",
    "dataset_path",
    "output_dir",
    "budget",
    "one_step",
    "dry_run",
    "degrade",
    "source_path",
    "resume",
}
ELSEWHERE |= {"condition_on", "use_cfg", "resume_from_checkpoint", "config", "import_"}
"""Flags that other parts of the page set."""
YES = {"yes": True, "no": False}


class Further:
    """A folded field for each flag. An empty field leaves the choice to the program."""

    def __init__(self) -> None:
        self.fields: dict[str, gr.components.Component] = {}
        self.changes: list[Callable[..., object]] = []
        """The events by which a field changes."""
        with gr.Accordion("Further settings", open=False, elem_id="further"):
            gr.HTML("The program chooses what you leave empty.")
            hints = get_type_hints(TrainConfig)
            for group in fields(TrainConfig):
                kind = hints[group.name]
                with gr.Accordion((kind.__doc__ or "").partition("\n")[0].rstrip("."), open=False):
                    for name, text, choices in flags_of(kind):
                        self._add(name, text, choices)

    def _add(self, name: str, text: str, choices: Sequence[str]) -> None:
        label = name.replace("_", " ")
        if choices:
            menu = gr.Dropdown(["", *choices], value="", label=label, info=text, elem_id=f"set-{name}")
            self.fields[name], change = menu, menu.input
        else:
            written = gr.Textbox("", label=label, info=text, elem_id=f"set-{name}")
            self.fields[name], change = written, written.blur
        self.changes.append(change)

    def flags(self, choices: Mapping[str, object]) -> dict[str, object]:
        """Return the flags that have a text among the choices, as values for a command line."""
        given = {name: text for name in self.fields if (text := str(choices[name] or "").strip())}
        try:
            return {name: YES.get(text, split(text)) for name, text in given.items()}
        except ValueError as error:
            raise UsageError("A further setting has an unmatched quotation mark.") from error


def flags_of(kind: type) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, the help and the choices of each flag of a group; a flag without choices takes a text."""
    helps, hints = helps_of(kind), get_type_hints(kind)
    for each in fields(kind):
        if each.name not in ELSEWHERE:
            parts = {hints[each.name], *get_args(hints[each.name])}
            literals = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
            choices = [*YES] if bool in parts else [str(word) for word in literals]
            yield each.name, helps.get(each.name, ""), choices


def helps_of(kind: type) -> Mapping[str, str]:
    """Return the help of each flag of a group: the docstring of its field."""
    [group] = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(group, ast.ClassDef)
    helps = dict[str, str]()
    for field, text in zip(group.body, group.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            helps[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return helps
