"""Tests of registered classes: descriptions are built again, and nothing else is built or imported."""

import importlib
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rectified_flow import registry
from rectified_flow.errors import UsageError
from rectified_flow.registry import build, describe, find, names, parameters_of, register
from rectified_flow.rooms import import_rooms


@pytest.fixture(autouse=True)
def _own_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the classes that a test registers after the test."""
    import_rooms()  # once in a process, and not into the registry of a test
    monkeypatch.setattr(registry, "_REGISTERED", defaultdict(dict))
    for kind in (Wheel, Vehicle, Car):
        register(kind)


@dataclass(frozen=True)
class Wheel:
    spokes: int = 8


class Vehicle:
    def __init__(self, *, name: str | None = None, speed: float = 1.0) -> None:
        self.name, self.speed = name, speed


class Car(Vehicle):
    def __init__(self, wheels: Any = (), *, spare: Wheel | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.wheels, self.spare = wheels, spare


class Lorry(Car):
    """A class without a constructor of its own."""


def there_and_back(value: Any) -> Any:
    return build(json.loads(json.dumps(describe(value))))


def test_nested_kinds_come_back_with_the_settings_of_the_base_class() -> None:
    car = Car((Wheel(3), Wheel()), spare=Wheel(5), name="beetle", speed=2.5)
    assert list(parameters_of(Car)) == ["wheels", "spare", "name", "speed"]
    back = there_and_back(car)
    assert type(back) is Car
    assert vars(back) == vars(car)
    assert describe(back) == describe(car)


def test_kinds_in_mappings_and_plain_data_come_back() -> None:
    wheels = {"front": Wheel(3), "rest": {"count": 2, "names": ("left", None, True, 0.5)}}
    assert there_and_back(Car(wheels)).wheels == wheels


def test_a_kind_without_a_constructor_has_that_of_its_base() -> None:
    register(Lorry)
    back = there_and_back(Lorry((Wheel(),), speed=3.0))
    assert type(back) is Lorry
    assert (back.wheels, back.speed) == ((Wheel(),), 3.0)


def test_a_subclass_that_is_not_registered_is_not_described_as_its_base() -> None:
    with pytest.raises(UsageError, match=r"Lorry is not registered.*decorate it with @rectified_flow"):
        describe(Lorry())


@pytest.mark.parametrize("name", ["os.system", "system", "subprocess.Popen", "imported_by_nobody.Kind", "eval",
                                  "print", "builtins.exec", "__import__", "object", "type", "nn.Linear"])  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_imported_or_called_because_a_file_names_it(
    name: str, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "called"
    (tmp_path / "imported_by_nobody.py").write_text(f"open({str(trace)!r}, 'w')\nclass Kind: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "system", lambda _command: trace.touch())
    before = set(sys.modules)
    evil = {"kind": name, "command": f"touch {trace}"}
    with pytest.raises(UsageError, match="is not registered: pass `import` with its module"):
        build({"kind": "Car", "wheels": [evil]} if nested else evil)
    assert set(sys.modules) == before
    assert not trace.exists()


def test_classes_are_found_by_their_base() -> None:
    assert names(Vehicle) == ["Car", "Vehicle"]
    assert find("vehicle", Vehicle, "Car") is Car
    with pytest.raises(UsageError, match="`vehicle` Wheel is not registered: choose Car or Vehicle, or pass `import`"):
        find("vehicle", Vehicle, "Wheel")


def test_functions_are_found_by_their_role() -> None:
    @register(role="metric")
    def length(rows: list[int]) -> int:
        return len(rows)

    assert names("metric") == ["length"]
    assert find("metrics", "metric", "length") is length
    assert length([1, 2]) == 2
    with pytest.raises(UsageError, match="the kind length is not registered"):
        build({"kind": "length"})
    with pytest.raises(UsageError, match=r"`optimizer` length is not registered: choose another, or pass"):
        find("optimizer", "optimizer", "length")


def test_two_functions_of_one_role_and_name_are_refused() -> None:
    def other() -> None: ...

    register(role="dataset")(other)
    other_again = lambda: None  # noqa: E731
    other_again.__name__ = "other"
    register(role="metric")(other_again)
    with pytest.raises(ValueError, match=r"other is registered already, by tests\.test_registry"):
        register(role="dataset")(other_again)


def test_a_module_that_is_imported_twice_may_register_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is imported as ``__main__``, and by its name where processes are spawned."""
    (tmp_path / "twice.py").write_text("from rectified_flow.registry import register\n@register\nclass Boat: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for _ in range(2):
        found.append(importlib.import_module("twice").Boat)
        del sys.modules["twice"]
    assert found[0] is not found[1]
    assert isinstance(build({"kind": "Boat"}), found[1])


def test_an_argument_without_an_attribute_is_named() -> None:
    @register
    class Forgetful:
        def __init__(self, kept: int, lost: int) -> None:
            self.kept = kept

    with pytest.raises(UsageError, match=r"Forgetful\.lost does not exist: keep each constructor argument"):
        describe(Forgetful(1, 2))


@pytest.mark.parametrize("value", [object(), {1: 2}, {3}, b"bytes", [Lorry()], lambda: None])
def test_what_is_neither_registered_nor_plain_is_named(value: object) -> None:
    with pytest.raises(UsageError, match=r"Car\.wheels is a \w+, neither plain data nor of a registered class"):
        describe(Car(value))


@pytest.mark.parametrize(
    "description",
    [
        {"kind": "Wheel", "spooks": 3},
        {"kind": "Car", "speed": 1.0, "colour": "red"},
        {"kind": "Needy"},
        {"kind": "Needy", "number": "text"},
        {"kind": "Needy", "number": 0},
    ],
)
def test_arguments_that_do_not_fit_are_told_with_their_kind(description: dict[str, Any]) -> None:
    @register
    class Needy:
        def __init__(self, number: int) -> None:
            self.number = 1 / number

    with pytest.raises(UsageError, match=f"{description['kind']} cannot be built from its description"):
        build(description)
