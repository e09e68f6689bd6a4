"""Registered classes and functions that flags name, such as ``--network NAME --network_options KEY=VALUE``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from rectified_flow.errors import UsageError, first_line, require
from rectified_flow.flags import Flags, in_words
from rectified_flow.registry import Role, find, names, parameters_of


@dataclass(frozen=True)
class Choice:
    """A registered class or function with the arguments that flags give it.

    Args:
        flag: the flag that names it, such as ``network``.
        target: the class or function.
        arguments: checked arguments.
    """

    flag: str
    target: Any
    arguments: Mapping[str, Any]

    def build(self, **context: Any) -> Any:
        """Call the target with its arguments, and those of ``context`` that it has a parameter for.

        Raises:
            UsageError: if an argument is missing, or the target refuses them.
        """
        parameters = parameters_of(self.target)
        arguments = {name: value for name, value in context.items() if name in parameters} | dict(self.arguments)
        missing = [name for name, p in parameters.items() if p.default is p.empty and name not in arguments]
        name = f"--{self.flag} {self.target.__name__}"
        require(not missing, f"{name} needs {' '.join(missing)}: pass --{self.flag}_options {missing[:1]}=VALUE")
        try:
            return self.target(**arguments)
        except (TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{name} cannot be built ({first_line(error)})") from error


def choose(flag: str, role: Role | type, name: str, options: Sequence[str] = (), **arguments: Any) -> Choice:
    """Return the registered class or function ``name`` with its options.

    Args:
        flag: the flag that names it; ``--{flag}_options`` has the options.
        role: its role or base class.
        name: its registered name.
        options: ``KEY=VALUE`` for parameters of the target.
        arguments: other arguments, which options override.

    Raises:
        UsageError: if it is not registered, or an option is unknown or has a value of another type.
    """
    known = names(role)
    require(
        name in known,
        f"--{flag} {name} is not registered: choose {' or '.join(known) or 'another'}, or pass --import MODULE with "
        "the Python module that registers it",
    )
    target = find(role, name)
    return Choice(flag, target, arguments | typed_options(flag, target, options))


def typed_options(flag: str, target: Any, options: Sequence[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` options with the types that the parameters of ``target`` are annotated with.

    Raises:
        UsageError: if an option is no pair, its key is unknown, or its value has another type.
    """
    parameters, typed = parameters_of(target), {}
    for option in options:
        key, equals, text = option.partition("=")
        require(equals == "=", f"--{flag}_options {option} is no KEY=VALUE")
        require(
            key in parameters,
            f"--{flag}_options {option}: {target.__name__} takes {', '.join(parameters) or 'no options'}",
        )
        typed[key] = _typed(f"--{flag}_options {key}", text, parameters[key].annotation)
    return typed


def arguments_from(group: Flags, target: Any, ours: type, flags: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of a class that flags of their own set, such as ``--dim`` of the Unet.

    Defaults of the flags are for ``ours`` and its subclasses; other classes have defaults of their own.

    Args:
        group: the flags.
        target: the class to build.
        ours: the class that the flags belong to.
        flags: names of flags by argument.

    Raises:
        UsageError: if a flag is given whose argument the class does not have.
    """
    defaults = {each.name: each.default for each in fields(group) if each.default is not MISSING}
    accepted, arguments = parameters_of(target), {}
    for argument, flag in flags.items():
        value = getattr(group, flag)
        given = value != defaults[flag]
        if argument in accepted and (given or issubclass(target, ours)):
            arguments[argument] = value
        require(
            argument in accepted or not given,
            f"--{flag} has no effect: {target.__name__} has no argument {argument}; leave it out",
        )
    return arguments


def _typed(name: str, text: str, annotation: Any) -> Any:
    """Return ``text`` as a value of the annotated type: read as JSON if that fits, else as it is."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    adapter = TypeAdapter(tuple[annotation], config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    for candidate in (value, text):
        try:
            return adapter.validate_python((candidate,))[0]
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
    raise UsageError(f"{name} is {text}; it must {in_words(problem)}")
