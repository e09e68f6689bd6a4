"""The declaration with which a part of a flow exports a module of its own as a program beside the flow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Exportable:
    """A module, how it is called, and what its program is compared on.

    Args:
        file: name of the program's file.
        module: called with ``inputs`` by name; returns a tensor, or several in a tuple.
        inputs: examples, at least two rows: a single row would fix the batch size.
        axes: the first axes of every input, whose sizes vary: a name for each, and its largest size or None.
        checks: inputs on which the program must agree with the module.
        files: contents of further files that a caller needs, by name.
        about: end of the line that a program prints.
    """

    file: str
    module: nn.Module
    inputs: Inputs
    axes: Sequence[tuple[str, int | None]]
    checks: Sequence[Inputs]
    files: Mapping[str, bytes] = field(default_factory=dict)
    about: str = ""
