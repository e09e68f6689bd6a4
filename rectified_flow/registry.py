"""Kinds by name, so that a checkpoint can say what it holds and be built again without naming code.

A description is plain JSON: the name of a registered class under ``kind``, and the arguments of its constructor. A
class takes part by :func:`register` and by keeping every argument in an attribute of the same name. Nothing is ever
imported because a file names it, and only registered classes are called.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

from rectified_flow.errors import UsageError
from rectified_flow.system.files import misfit

C = TypeVar("C", bound=type)
_KINDS: dict[str, type] = {}
_Plain = bool | int | float | str | None


class DescriptionError(UsageError):
    """An object cannot be described, or a description cannot be built."""


def register(kind: C) -> C:
    """Class decorator: let checkpoints name this class.

    Raises:
        ValueError: if another class has the same name.
    """
    known = _KINDS.get(kind.__name__)
    if known is not None and _source(known) != _source(kind):
        raise ValueError(f"{kind.__name__} is registered already, by {known.__module__}: choose another name")
    _KINDS[kind.__name__] = kind
    return kind


def is_registered(value: object) -> bool:
    """Whether the class of ``value`` is a registered kind."""
    return _KINDS.get(type(value).__name__) is type(value)


def describe(value: object) -> dict[str, Any]:
    """Describe a registered object as JSON can hold it.

    Raises:
        DescriptionError: if it, or one of its arguments, is neither registered nor plain data.
    """
    if not is_registered(value):
        raise DescriptionError(
            f"{type(value).__name__} is not registered, so a checkpoint cannot say how to build it: decorate the class "
            "with @rectified_flow.register"
        )
    return {"kind": type(value).__name__} | {
        name: _plain(getattr(value, name, inspect.Parameter.empty), f"{type(value).__name__}.{name}")
        for name in arguments_of(type(value))
    }


def build(description: Mapping[str, Any]) -> Any:
    """Build what :func:`describe` described.

    Raises:
        DescriptionError: if a kind is not registered, or the arguments do not fit it.
    """
    kind = description.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DescriptionError(
            f"the kind {kind!r} is not registered: pass --import MODULE with the Python module that defines it"
        )
    arguments = {name: _built(value) for name, value in description.items() if name != "kind"}
    _check_arguments(_KINDS[kind], arguments)
    try:
        return _KINDS[kind](**arguments)
    except UsageError:
        raise
    except Exception as error:  # the constructor's own
        raise DescriptionError(f"{kind} cannot be built from its description ({error})") from error


def arguments_of(kind: type) -> list[str]:
    """The names of the constructor's arguments; ``**settings`` stands for those of the base class."""
    names: list[str] = []
    for each in kind.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = list(inspect.signature(vars(each)["__init__"]).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(dict.fromkeys(names))


def _check_arguments(kind: type, arguments: Mapping[str, Any]) -> None:
    """Raise a DescriptionError unless a class takes the arguments, and those of this package's have the right types.

    Others may annotate loosely, and refuse for themselves what they cannot take.
    """
    unknown = arguments.keys() - arguments_of(kind)
    if unknown:
        raise DescriptionError(
            f"{kind.__name__} cannot be built from its description: it has no argument {min(unknown)!r}; if a newer "
            "version wrote that, upgrade"
        )
    seen: set[str] = set()
    for each in kind.__mro__:
        parameters = inspect.signature(vars(each)["__init__"]).parameters if "__init__" in vars(each) else {}
        if each.__module__.startswith(f"{__package__}."):
            types = get_type_hints(each.__init__)  # type: ignore[misc]
            for name in (arguments.keys() & parameters.keys()) - seen:
                problem = misfit(_with_tuples(arguments[name]), types[name])
                if problem is not None:
                    raise DescriptionError(f"{kind.__name__}.{name} is {problem}")
        seen |= parameters.keys()


def _with_tuples(value: Any) -> Any:
    """Lists as tuples, which any annotation of a sequence takes."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _plain(value: object, name: str) -> Any:
    if is_registered(value):
        return describe(value)
    if isinstance(value, _Plain):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, name) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, name) for key, each in value.items()}
    if value is inspect.Parameter.empty:
        raise DescriptionError(f"{name} does not exist: keep each constructor argument in an attribute of its name")
    raise DescriptionError(
        f"{name} is a {type(value).__name__}, neither plain data nor registered by @rectified_flow.register"
    )


def _built(value: Any) -> Any:
    if isinstance(value, list):
        return [_built(each) for each in value]
    if isinstance(value, Mapping):
        return build(value) if "kind" in value else {key: _built(each) for key, each in value.items()}
    return value


def _source(kind: type) -> tuple[str, str | None]:
    """Where a class is written: a program's own module may be imported twice, once as ``__main__``."""
    find: Callable[[type], str | None] = inspect.getsourcefile
    try:
        return kind.__qualname__, find(kind)
    except (OSError, TypeError):
        return kind.__qualname__, None
