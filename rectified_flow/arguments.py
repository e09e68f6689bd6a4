"""Arguments of functions and constructors, checked by their annotations."""

import inspect
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rectified_flow.errors import LONGEST, UsageError, quoted

T = TypeVar("T", bound=Callable[..., object])


def parameters_of(target: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or constructor by name, with their annotations resolved.

    ``**settings`` of a constructor stands for the parameters of the base class.
    """
    functions: list[Callable[..., object]] = [target]
    if isinstance(target, type):
        functions = [vars(each)["__init__"] for each in target.__mro__ if "__init__" in vars(each)]
    found: dict[str, inspect.Parameter] = {}
    for function in functions:
        parameters = annotated_parameters(function)
        for each in parameters:
            if each.name != "self" and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                found.setdefault(each.name, each)
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            break
    return found


def fitting(name: str, candidates: Iterable[object], hint: object, *, strict: bool = False) -> object:
    """Return the first candidate that fits the annotation ``hint``, as a value of its type.

    Args:
        name: the argument for error messages.
        candidates: one value, or several readings of a text.
        hint: the annotation.
        strict: refuse values of other types instead of converting them.

    Raises:
        UsageError: if no candidate fits.
    """
    from pydantic import ValidationError  # importing models does not load it

    try:
        adapter = _adapter(hint)
    except TypeError:  # the annotation of a user's class may be unhashable, as one with a list
        adapter = _adapter.__wrapped__(hint)
    for candidate in candidates:
        try:
            [value] = adapter.validate_python((candidate,), strict=strict or None)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
        else:
            return value
    requirement = problem["msg"].partition(" should ")[2] or problem["msg"]
    raise UsageError(f"{name} is {str(problem['input'])[:LONGEST]}; it must {requirement}")


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # In a tuple, as pydantic takes no rules for a dataclass alone.
    return TypeAdapter(tuple[hint], config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def checked(function: T) -> T:
    """Check the arguments of a function against its annotations at each call, and pass them on unchanged.

    A list is accepted for a tuple, and a string for a path, as in a description.

    Raises:
        UsageError: if an argument does not fit.
    """

    @wraps(function)
    def call(*args: object, **settings: object) -> object:
        parameters = annotated_parameters(function)
        hints = {each.name: each.annotation for each in parameters}
        others = next((each.annotation for each in parameters if each.kind is each.VAR_KEYWORD), object)
        for name, value in {**dict(zip(hints, args, strict=False)), **settings}.items():
            hint = hints.get(name, others)
            if hint is not object:
                fitting(quoted(name), _readings(value, hint), hint, strict=True)
        return function(*args, **settings)

    return call  # type: ignore[return-value]


def _readings(value: object, hint: object) -> Iterator[object]:
    """Yield the forms of a value to check: the value, and the numbers of an array, if the array itself does not fit."""
    yield as_described(value, hint)
    if hasattr(value, "tolist"):
        yield as_described(value.tolist(), hint)


@cache
def annotated_parameters(function: Callable[..., object]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function with their annotations resolved; ``object`` for those without one."""
    hints: dict[str, object] = {}
    with suppress(Exception):  # a user's annotation may name what is imported for type checks only
        hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.replace(annotation=hints.get(each.name, object)) for each in parameters)


def as_described(value: object, hint: object) -> object:
    """Return a value as it comes back from a description: scalars as numbers, paths, and sequences.

    Sequences are tuples, except where the annotation ``hint`` asks for a list.
    """
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return dict(value)
    expected = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    allowed = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    if isinstance(value, list | tuple | KeysView | ValuesView):
        for each in allowed:
            if list in (each, get_origin(each)):
                [of_items] = get_args(each) or (object,)
                return [as_described(item, of_items) for item in value]
        return tuple(as_described(each, object) for each in value)
    if isinstance(value, str) and Path in allowed and str not in allowed:
        return Path(value)  # a description holds a path as text
    return plain_number(value)


def plain_number(value: object) -> object:
    """Return a scalar of NumPy or torch as a number of Python, and other values as they are."""
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value  # type: ignore[attr-defined]
