"""Train one-step and few-step image generators from your own pictures with rectified flow."""

import ast
from importlib import import_module
from pathlib import Path

from rectified_flow.registry import before_lookup
from rectified_flow.rooms import import_rooms

# The first look-up of a name needs all classes; an import of this package alone, as for --help, needs none of them.
before_lookup(import_rooms)

# A name's module is imported when the name is first used, since --help needs none of them. (The package lazy_loader
# reads a stub in the same way, but a missing package could not be reported before the first import of this one.)
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
