"""JSON documents: what is read back has the types of the dataclass that it was written from, or is refused.

A document whose dataclass has a field ``sha256`` carries a hash of its other keys, by which any change is noticed.
"""

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rectified_flow.errors import DamageError, NewerError
from rectified_flow.files import read_bytes, replace_file

if TYPE_CHECKING:  # the command line imports this module, and pydantic takes as long as all of it
    from pydantic import TypeAdapter

T = TypeVar("T")
SEAL = "sha256"
LONGEST = 60


def read_document(path: Path, schema: type[T]) -> T:
    """The document at ``path``.

    Args:
        path: a regular file.
        schema: a dataclass, or another type that the whole document must have.

    Raises:
        UsageError: if the rights of the file forbid reading it.
        NewerError: if it has a key that the schema does not know.
        DamageError: if it is missing, is no JSON, does not fit the schema, or does not have the hash that it names.
    """
    content = read_bytes(path)
    if SEAL in getattr(schema, "__dataclass_fields__", ()):
        document = parse_document(content, dict[str, Any], path)
        if document.get(SEAL, "") not in ("", _hash(document)):
            raise DamageError(f"{path} was altered")
    return parse_document(content, schema, path)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document that carries its hash, whole or not at all.

    Raises:
        OSError: if that fails.
    """
    replace_file(path, json.dumps({**document, SEAL: _hash(document)}, indent=1))


def parse_document(content: bytes | str, schema: type[T], source: object) -> T:
    """A document from its text; ``source`` is what an error names.

    Raises:
        NewerError: if it has a key that the schema does not know.
        DamageError: if it is no JSON, or does not fit the schema.
    """
    from pydantic import ValidationError

    try:
        adapter = _adapter(schema)  # type: ignore[arg-type]  # a class is hashable
        return cast(T, adapter.validate_json(content, strict=True, extra="forbid"))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    unknown = next((each for each in problems if each["type"] == "unexpected_keyword_argument"), None)
    problem = unknown or problems[0]
    key = ".".join(map(str, problem["loc"]))
    if unknown is not None:
        raise NewerError(f"{source} was written by a newer version of this project (it has the key {key!r}): upgrade")
    if problem["type"] == "json_invalid":
        raise DamageError(f"{source} cannot be read ({problem['msg']})")
    if problem["type"] == "missing":
        raise DamageError(f"{source} is damaged: the key {key!r} is missing")
    if problem["type"] == "value_error":  # of the dataclass
        raise DamageError(f"{source} is damaged: {problem['ctx']['error']}")
    if problem["type"] == "literal_error":  # a choice that was removed, or is of a newer version
        raise DamageError(f"{source} does not fit this version of the project: {key} is {_in_words(problem)}")
    raise DamageError(f"{source} is damaged: {key or 'it'} is {_in_words(problem)}")


def check_document(document: object, schema: type[T], source: object) -> T:
    """As :func:`parse_document`, for a document that was read already."""
    return parse_document(json.dumps(document), schema, source)


def misfit(value: object, expected: Any) -> str | None:
    """How a value that is no document, such as an argument, differs from the type that it is annotated with; or None.

    Numbers must be finite, and a tuple may stand for any sequence.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    try:
        rules = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
        # In a tuple, as pydantic takes no rules for a dataclass alone.
        TypeAdapter(tuple[expected], config=rules).validate_python((value,), strict=True)
    except ValidationError as error:
        return _in_words(error.errors(include_url=False)[0])
    return None


def _in_words(problem: Mapping[str, Any]) -> str:
    """``"6", but input should be a valid integer``."""
    shown, message = json.dumps(problem["input"], default=repr), problem["msg"]
    return f"{shown[:LONGEST]}{'...' * (len(shown) > LONGEST)}, but {message[0].lower()}{message[1:]}"


@cache
def _adapter(schema: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _hash(document: Mapping[str, Any]) -> str:
    """Of all keys but that of the hash itself, however they are written down."""
    content = {key: value for key, value in document.items() if key != SEAL}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
