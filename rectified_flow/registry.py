"""Classes and functions by name, for checkpoints and for the command line.

:func:`register` gives a class or function its name. The names serve two purposes:

- *Descriptions.* A checkpoint describes its flow as plain JSON: the name of a registered class under ``kind``, and the
  arguments of its constructor. :func:`describe` reads each argument from the attribute of the same name, and
  :func:`build` calls the constructor. No module is ever imported because a file names it, and only registered classes
  are called.
- *Flags.* A flag such as ``optimizer`` takes a name, and :func:`find` returns what has been registered under it.

This module imports none of the modules that register: :mod:`rectified_flow.rooms` lists those of optional folders.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from rectified_flow.arguments import as_described, checked, parameters_of, plain_number
from rectified_flow.errors import UsageError, first_line, quoted

Role = Literal["network", "flow", "dataset", "reader", "optimizer", "metric", "score", "format"]
"""The purpose of a registered class or function; checkpoints describe networks, flows and classes without a role."""
OFFERS: Mapping[Role, Mapping[str, str]] = {
    "network": {
        "shape": "the shape of one x, (c, h, w) for pictures; () if the space does not know it",
        "channels": "the first number of the shape; None if there is none",
        "image_size": "the shorter side of x; None if it has no sides",
        "conditions": "the kinds of the conditions by their names, as the attribute `conditions` keeps them",
        "dim": "the flag of this name, if it is given",
        "dim_mults": "the flag of this name, if it is given",
        "dropout": "the flag of this name",
    },
    "flow": {
        "space": "the space of the data",
        "condition_dropout": "the share of rows that are trained without conditions",
        "from_source": "with sources: whether paths start from them instead of from noise",
        "source_noise": "with sources: the standard deviation of the noise on a source that paths start from",
        "time_distribution": "the distribution of the training times, if a flag or the method chooses one",
        "prediction": "the flag of this name, if it is given",
        "coupling": "the flag of this name, if it is given",
        "guidance_scale": "the flag of this name, if it is given and there is no teacher",
    },
    "dataset": {
        "image_size": "the flag of this name",
        "cache_dir": "the folder for decoded data; None for the default",
    },
    "optimizer": {
        "lr": "the peak learning rate",
        "fused": "whether one kernel may update all parameters, as on a GPU",
    },
    "format": {
        "half": "the flag of this name, if it is given",
        "metadata": "the flag of this name, if it is given",
    },
}
"""The arguments that programs offer to the parts of a role, which ``needs`` of :func:`register` asks for."""
T = TypeVar("T", bound=Callable[..., object])
Document = dict[str, Any]
"""A JSON object with values of many types, such as a description, the contents of a file, or a line of a log."""
_REGISTERED: defaultdict[Role | None, dict[str, Any]] = defaultdict(dict)
"""Registered classes and functions by role and name. The role None has all classes that checkpoints describe."""
_DESCRIBED: tuple[Role | None, ...] = (None, "network", "flow")
_NEEDS: dict[object, tuple[str, ...]] = {}
"""Names of the offered arguments that a registered class or function asks for."""
_COMPLETING: list[Callable[[], object]] = []
"""Functions that import what a name may stand for; see :func:`before_lookup`."""
_Plain = bool | int | float | str | None
_MAPPING = "mapping"
"""The kind of a mapping with a key ``kind``, which would otherwise be taken for the description of an object."""


@overload
def register(target: T, /) -> T: ...
@overload
def register(*, role: Role | None = None, needs: Sequence[str] | None = None) -> Callable[[T], T]: ...
def register(target: T | None = None, /, *, role: Role | None = None, needs: Sequence[str] | None = None) -> Any:
    """Register a class or function under its own name. This is a decorator, with or without arguments.

    From then on, constructors of this package check their arguments by their annotations.

    Args:
        target: the class or function.
        role: the purpose of the target. Without a role, it is a class that checkpoints describe, and that is found by
            its base class: a space, condition, time distribution, degradation or autoencoder.
        needs: names of the arguments that the target asks programs for, of those that :data:`OFFERS` has for the role.
            Other arguments are not handed over. A class without ``needs`` has those of its nearest registered base.

    Raises:
        ValueError: if another class or function of this role has the same name, or ``needs`` has a name that the role
            does not offer, or that the target has no parameter for.
    """
    if target is None:
        return partial(register, role=role, needs=needs)
    name = target.__name__
    shelves: set[Role | None] = {role, None} if role in _DESCRIBED else {role}
    for shelf in shelves:
        known = _REGISTERED[shelf].get(name, target)
        if _source(known) != _source(target):
            raise ValueError(f"{name} is registered already, by {known.__module__}: choose another name")
    if needs is not None:
        _check_needs(target, role, needs)
        _NEEDS[target] = tuple(needs)
    for shelf in shelves:
        _REGISTERED[shelf][name] = target
    if isinstance(target, type) and None in shelves:
        _check_constructors(target)
    return target


def _check_constructors(kind: type) -> None:
    """Have the constructors of a class and of its bases check their arguments, if they are of this package."""
    for each in kind.__mro__:
        constructor = vars(each).get("__init__")
        if _is_own(each) and constructor is not None and not hasattr(constructor, "__wrapped__"):
            each.__init__ = checked(constructor)  # type: ignore[misc]


def needs_of(target: object) -> tuple[str, ...]:
    """Return the names of the offered arguments that a registered class or function asks for."""
    bases = target.__mro__ if isinstance(target, type) else (target,)
    return next((_NEEDS[each] for each in bases if each in _NEEDS), ())


def _check_needs(target: Callable[..., object], role: Role | None, needs: Sequence[str]) -> None:
    offered: Mapping[str, str] = {} if role is None else OFFERS.get(role, {})
    parameters = parameters_of(target)
    for name in needs:
        if name not in offered:
            whom, known = role or "class without a role", ", ".join(offered) or "none"
            raise ValueError(f"{target.__name__} needs {name!r}, but a {whom} is offered {known}")
        if name not in parameters:
            raise ValueError(f"{target.__name__} needs {name!r}, but has no parameter of this name: add it")


def before_lookup(complete: Callable[[], object]) -> None:
    """Have ``complete`` called before each look-up of a name: it imports modules that register classes."""
    _COMPLETING.append(complete)


def names(role: Role | type) -> list[str]:
    """Return the registered names of a role, or of the subclasses of a class."""
    _complete()
    if isinstance(role, str):
        return sorted(_REGISTERED[role])
    kinds = _REGISTERED[None].items()
    return sorted(name for name, kind in kinds if issubclass(kind, role))


def find(flag: str, role: Role | type, name: str, others: Collection[str] = ()) -> Any:
    """Return what :func:`names` has under ``name``; the error names ``flag`` and lists the names.

    Args:
        flag: name of the argument.
        role: the role of the part.
        name: name of the part.
        others: names of other roles that the argument takes, too.
    """
    known = names(role)
    choices = " or ".join([*known, *others]) or "another"
    if name not in known and isinstance(role, str) and name in _REGISTERED[None]:
        raise UsageError(
            f"{quoted(flag)} {name} is registered without this role: decorate it with @register(role={role!r})"
        )
    if name not in known:
        remedy = f"choose {choices}, or pass `import` with its module"
        raise UsageError(f"{quoted(flag)} {name} is not registered: {remedy}")
    return _REGISTERED[role if isinstance(role, str) else None][name]


def _complete() -> None:
    for complete in _COMPLETING:
        complete()


def is_registered(value: object) -> bool:
    """Return whether the class of ``value`` is registered, as the classes in a description must be."""
    return _REGISTERED[None].get(type(value).__name__) is type(value)


def describe(value: object) -> Document:
    """Describe an object of a registered class, with its constructor's arguments, as JSON can hold it."""
    kind = type(value).__name__
    if not is_registered(value):
        raise UsageError(f"{kind} is not registered: decorate it with @rectified_flow.register")
    arguments = {}
    for name in parameters_of(type(value)):
        if not hasattr(value, name):
            raise UsageError(f"{kind}.{name} does not exist: keep each constructor argument in an attribute")
        if name == "kind":
            raise UsageError(f"{kind}.kind has the name under which a checkpoint keeps the class: rename the argument")
        arguments[name] = as_plain(getattr(value, name), f"{kind}.{name}")
    return {"kind": kind} | arguments


def build(description: Mapping[str, object]) -> Any:
    """Build the object that :func:`describe` described; lists become tuples, unless the annotation is a list."""
    name = str(description.get("kind"))
    _complete()
    kind = _REGISTERED[None].get(name)
    if kind is None:
        raise UsageError(f"the kind {name} is not registered: pass `import` with its module")
    arguments = {key: _built(value) for key, value in description.items() if key != "kind"}
    try:
        return kind(**_as_described(kind, arguments))
    except Exception as error:  # of any type: the constructor may be a user's
        raise UsageError(f"{name} cannot be built from its description: {first_line(error)}") from error


def _as_described(kind: type, arguments: Mapping[str, object]) -> Mapping[str, object]:
    """Return arguments as the constructor of a class takes them."""
    hints = {name: each.annotation for name, each in parameters_of(kind).items()}
    unknown = arguments.keys() - hints.keys()
    if unknown and _is_own(kind):  # the constructor of a user's class refuses them itself
        raise UsageError(f"it has no argument {min(unknown)!r}; upgrade if a newer version wrote the description")
    return {name: as_described(value, hints.get(name, object)) for name, value in arguments.items()}


def _is_own(kind: type) -> bool:
    """Return whether a class is of this package: others may have loose annotations, and check the values themselves."""
    return kind.__module__.startswith(f"{__package__}.")


def as_plain(value: object, name: str) -> object:
    """Return the value called ``name`` in a form that JSON can store."""
    if is_registered(value):
        return describe(value)
    value = plain_number(value)
    if isinstance(value, _Plain):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [as_plain(each, name) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        items = {key: as_plain(each, name) for key, each in value.items()}
        return {"kind": _MAPPING, "items": items} if "kind" in items else items
    raise UsageError(f"{name} is a {type(value).__name__}, neither plain data nor of a registered class")


def _built(value: object) -> object:
    if isinstance(value, list):
        return tuple(_built(each) for each in value)
    if not isinstance(value, Mapping):
        return value
    items = value.get("items") if value.get("kind") == _MAPPING else None
    if "kind" in value and not isinstance(items, Mapping):
        return build(value)
    return {key: _built(each) for key, each in (value if items is None else items).items()}


def _source(target: Callable[..., object]) -> tuple[str, str | None]:
    """Return the place of a definition: a program's own module may be imported twice, once as ``__main__``."""
    return target.__qualname__, getattr(sys.modules.get(target.__module__), "__file__", None)
