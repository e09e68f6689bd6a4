"""Parts by their words: the name of a registered class or function, and its arguments, as ``KEY=VALUE``."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rectified_flow.arguments import fitting, parameters_of
from rectified_flow.errors import UsageError, first_line, quoted
from rectified_flow.registry import OFFERS, Role, find, names, needs_of
from rectified_flow.system.files import usable_path


@dataclass(frozen=True)
class Choice:
    """A registered class or function with the arguments that flags give it.

    Args:
        flag: the flag that names it, such as ``network``.
        target: the class or function.
        arguments: checked arguments.
        role: the role of the target, or its base class.
    """

    flag: str
    target: Any
    arguments: Mapping[str, object]
    role: Role | type

    def build(self, *inputs: object, **offered: object) -> Any:
        """Call the target with its inputs and arguments, and with what it needs of the offered arguments.

        Args:
            inputs: positional arguments, which each part of the role takes, such as the network of a flow.
            offered: values by the names in :data:`OFFERS`.
        """
        needed = needs_of(self.target)
        arguments = {name: value for name, value in offered.items() if name in needed} | dict(self.arguments)
        self._check_declared(arguments, len(inputs))
        try:
            return self.target(*inputs, **arguments)
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            name = self.target.__qualname__.removesuffix(".of")
            raise UsageError(f"{quoted(self.flag)} {name} cannot be built ({first_line(error)})") from error

    def _check_declared(self, arguments: Mapping[str, object], inputs: int) -> None:
        """Check that the target asks for each offered argument that it requires."""
        offers, needed = {} if isinstance(self.role, type) else OFFERS.get(self.role, {}), needs_of(self.target)
        parameters = [*parameters_of(self.target).values()][inputs:]
        required = [each.name for each in parameters if each.default is each.empty and each.name not in arguments]
        if missing := [name for name in required if name in offers and name not in needed]:
            needs = ", ".join(f'"{name}"' for name in (*needed, *missing))
            declaration = f'decorate it with @register(role="{self.role}", needs=[{needs}])'
            raise UsageError(f"{quoted(self.flag)} {self.target.__qualname__} asks for no {missing[0]}: {declaration}")


def split_part(part: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a part, which is empty if only arguments are given, and its arguments."""
    words = [part] if isinstance(part, str) else [*part]
    is_named = bool(words) and not re.match(r"[^\W\d]\w*=", words[0])  # paths and hub ids may contain =
    return (words[0], words[1:]) if is_named else ("", words)


def name_of(part: Sequence[str]) -> str:
    """Return the name of a part, which is empty if only arguments are given."""
    return split_part(part)[0]


def choose(flag: str, role: Role | type, part: Sequence[str]) -> Choice:
    """Return a registered class or function with its arguments."""
    name, options = split_part(part)
    target = find(flag, role, name or " ".join(options))
    return Choice(flag, target, typed_options(flag, target, options), role)


def typed_options(flag: str, target: Callable[..., object], options: Sequence[str]) -> dict[str, object]:
    """Return ``KEY=VALUE`` options with the types that the parameters of ``target`` are annotated with."""
    parameters, typed = parameters_of(target), dict[str, object]()
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or key not in parameters:
            known, name = ", ".join(parameters) or "none", target.__qualname__.removesuffix(".of")
            raise UsageError(f"{quoted(flag)} {option}: {name} takes KEY=VALUE with the keys {known}")
        candidates: list[object] = [text]
        with suppress(ValueError, RecursionError):  # a number of more than 4,300 digits, and brackets in brackets
            candidates = [json.loads(text), text]
        typed[key] = validated(f"{quoted(flag)} {key}", candidates, parameters[key].annotation)
    return typed


def choose_named(flag: str, base: type, text: str) -> Any:
    """Return the object of ``NAME`` or ``NAME:VALUE``, with the value of the constructor's first argument."""
    name, colon, value = text.partition(":")
    known = {each.lower(): each for each in names(base)}
    target = find(flag, base, known.get(name.lower(), name))
    options = [f"{next(iter(parameters_of(target)), name)}={value}"] if colon else []
    return Choice(flag, target, typed_options(flag, target, options), base).build()


def validated(name: str, candidates: Sequence[object], hint: Any) -> Any:
    """Return the first candidate that fits the annotation ``hint``; a path is returned as one that can be used."""
    value = fitting(name, candidates, hint)
    return usable_path(name, value) if isinstance(value, Path) else value


def arguments_from(group: object, names: Sequence[str], target: Callable[..., object]) -> dict[str, object]:
    """Return those of the named flags that differ from their defaults, as arguments that ``target`` needs."""
    values = {name: getattr(group, name) for name in names}
    given = {name: value for name, value in values.items() if value != getattr(type(group), name)}
    for name in given.keys() - set(needs_of(target)):
        raise UsageError(f"`{name}` has no effect: {target.__name__} does not ask for {name}; leave it out")
    return given
