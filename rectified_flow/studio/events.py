"""Events of the page: a handler answers at once, and a mistake of the user is a sentence."""

import time
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import gradio as gr

from rectified_flow.errors import UsageError
from rectified_flow.system.files import writing
from rectified_flow.system.terminal import shown

Component: TypeAlias = gr.components.Component
Values: TypeAlias = dict[Component, Any]
"""Values of components on the page, or new ones."""


def act(
    events: Sequence[Callable[..., object]],
    handler: Callable[..., object],
    inputs: set[Component],
    outputs: Collection[Component] = (),
    *,
    queue: bool = True,
) -> None:
    """Call a handler with the values of the inputs when an event occurs. The events are not a public API.

    A handler returns new values, and does not wait for the processes that it starts. Only a queued handler can show
    an error; an unqueued handler responds faster.
    """

    @wraps(handler)
    def told(*values: object) -> object:
        try:
            with writing("a file", UsageError, "make room on the disk, and try again"):
                return handler(*values)
        except UsageError as error:
            raise gr.Error(escape(shown(str(error))), print_exception=False) from error

    gr.on(events, told, inputs, [*outputs], show_progress="hidden", api_visibility="private", queue=queue)


def file_shown(path: Path | None, label: str = "", **more: object) -> object:
    """Return an update of a component that shows a file; the component is hidden if the file does not exist.

    The time of writing is added to the label, so that the page reloads a file that was replaced.
    """
    if path is None or not path.exists():
        return gr.update(value=None, visible=False)
    if label:
        more["label"] = time.strftime(f"{label}, %H:%M:%S", time.localtime(path.stat().st_mtime))
    return gr.update(value=str(path), visible=True, **more)
