"""Events of the page: a handler answers at once, and a mistake of the user is a sentence."""

from collections.abc import Callable, Sequence
from functools import wraps
from html import escape
from typing import Protocol, TypeAlias

import gradio as gr

from rectified_flow.errors import UsageError
from rectified_flow.system.files import writing
from rectified_flow.system.terminal import shown

Shown = dict[int, str]
"""What a page shows, by the number of each component."""
Updates = dict[gr.components.Component, object]
"""New values of components."""


class Part(Protocol):
    """A part of the page that shows the state on the disk."""

    inputs: list[gr.components.Component]
    outputs: list[gr.components.Component]

    @property
    def wanted(self) -> Callable[..., Updates]:
        """Function that returns what the part shows, from the values of its inputs."""


Components: TypeAlias = Sequence[gr.components.Component] | gr.components.Component | None


def act(
    event: Callable[..., object],
    handler: Callable[..., object],
    inputs: Components,
    outputs: Components,
    *,
    queue: bool = True,
) -> None:
    """Call a handler on an event of the page. The event is not part of an API for other programs.

    A handler does not wait for the processes that it starts. Only a handler with a queue can show an error; one
    without answers sooner.
    """

    @wraps(handler)
    def told(*values: object) -> object:
        try:
            with writing("a file", UsageError, "make room on the disk, and try again"):
                return handler(*values)
        except UsageError as error:
            raise gr.Error(escape(shown(str(error))), title="That does not work", print_exception=False) from error

    event(told, inputs, outputs, show_progress="hidden", api_visibility="private", queue=queue)
