"""Tests of registered classes: descriptions are built again, and nothing else is built or imported."""

import importlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from rectified_flow import registry
from rectified_flow.arguments import parameters_of
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.parts import choose
from rectified_flow.registry import OFFERS, build, describe, find, names, register


@pytest.fixture(autouse=True)
def _own_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the classes that a test registers after the test."""
    names("score")  # what a look-up imports is imported once in a process, and not into the registry of a test
    monkeypatch.setattr(registry, "_REGISTERED", defaultdict(dict))
    monkeypatch.setattr(registry, "_NEEDS", {})
    for kind in (Wheel, Vehicle, Car, Unet):
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


@pytest.mark.parametrize(
    "wheels",
    [{"kind": "steel"}, {"kind": Wheel(3), "items": (1,)}, {"a": {"kind": "Wheel"}}, {"kind": "mapping", "items": {}}],
)
def test_mappings_with_the_key_kind_come_back(wheels: Any) -> None:
    assert there_and_back(Car(wheels)).wheels == wheels


def test_an_argument_called_kind_is_refused() -> None:
    @register
    class Kindly:
        def __init__(self, kind: str) -> None:
            self.kind = kind

    with pytest.raises(UsageError, match=r"^Kindly\.kind has the name under which .*: rename the argument"):
        describe(Kindly("good"))


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


def test_a_part_gets_what_it_needs_and_nothing_else() -> None:
    @register(role="network", needs=("channels",))
    class Asking(Wheel):
        def __init__(self, channels: int, image_size: int = 7) -> None:
            self.given: object = (channels, image_size)

    @register(role="network")
    class Inheriting(Asking): ...

    @register(role="network", needs=())
    class Silent(Asking):
        def __init__(self) -> None:
            self.given = "none"

    offered = {"channels": 3, "image_size": 8, "shape": (3, 8, 8)}
    given = {kind.__name__: choose("network", "network", (kind.__name__,)).build(**offered).given
             for kind in (Asking, Inheriting, Silent)}  # fmt: skip
    assert given == {"Asking": (3, 7), "Inheriting": (3, 7), "Silent": "none"}
    assert choose("network", "network", ("Asking", "channels=4")).build(**offered).given == (4, 7)
    assert names("network") == ["Asking", "Inheriting", "Silent"]
    assert names(Wheel) == ["Asking", "Inheriting", "Silent", "Wheel"], "checkpoints describe networks, too"


@pytest.mark.parametrize(
    ("role", "needs", "message"),
    [
        ("network", "shapes", r"Kind needs 'shapes', but a network is offered shape, channels, "),
        ("network", "shape", r"Kind needs 'shape', but has no parameter of this name: add it"),
        ("metric", "shape", r"Kind needs 'shape', but a metric is offered none"),
        (None, "shape", r"Kind needs 'shape', but a class without a role is offered none"),
    ],
)
def test_needs_that_nobody_can_meet_are_refused(role: Any, needs: str, message: str) -> None:
    class Kind:
        def __init__(self, shapes: int = 0) -> None: ...

    with pytest.raises(ValueError, match=message):
        register(role=role, needs=(needs,))(Kind)
    assert "Kind" not in names(Kind)


def test_a_part_that_declares_nothing_is_told_what_to_declare() -> None:
    @register(role="dataset")
    def rows(cache_dir: Path, image_size: int, more: int = 0) -> int:
        return image_size + more

    for words in (("rows",), ("rows", "more=2")):
        with pytest.raises(UsageError, match=re.escape('@register(role="dataset", needs=["cache_dir", "image_size"])')):
            choose("dataset", "dataset", words).build(image_size=8, cache_dir=None)

    @register
    class Unmarked: ...

    with pytest.raises(UsageError, match=re.escape("decorate it with @register(role='network')")):
        find("network", "network", "Unmarked")


def test_the_documentation_lists_what_is_offered() -> None:
    text = (Path(registry.__file__).parents[1] / "docs/architecture.md").read_text()
    for role, offers in OFFERS.items():
        [row] = re.findall(rf"^\| {role} \| (.*) \|$", text.partition("| role | offered")[2], re.M)
        assert re.findall(r"`(\w+)`", row) == list(offers)


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


class Loose(RectifiedFlow):
    """A flow of one's own, without annotations."""

    def __init__(self, network, more="any", **settings):  # type: ignore[no-untyped-def]
        super().__init__(network, **settings)
        self.more = more


@pytest.mark.parametrize("kind", [RectifiedFlow, Loose])
@pytest.mark.parametrize(
    ("name", "value", "requirement"),
    [
        ("prediction", "x0", "be 'velocity', 'clean' or 'noise'"),
        ("distance", "l1", "be 'mse' or 'pseudo_huber'"),
        ("coupling", "OT", "be 'independent', 'ot' or 'immiscible'"),
        ("condition_dropout", 2.0, "be less than or equal to 1"),
        ("space", "pixels", "be an instance of Space"),
    ],
)
def test_a_constructor_of_the_package_checks_its_arguments(
    kind: type[Flow], name: str, value: Any, requirement: str
) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is {value}; it must {requirement}"):
        kind(nn.Identity(), **{name: value})
    assert kind(nn.Identity(), condition_dropout=0.5).condition_dropout == 0.5


class Listed:
    """A class of one's own, with lists."""

    def __init__(
        self, sizes: list[int], more: list[list[int]] | None = None, rest: Sequence[int] = (), place: Path | None = None
    ) -> None:
        self.sizes, self.more, self.rest, self.place = sizes, more, rest, place


def test_lists_of_a_users_class_come_back_as_lists() -> None:
    register(Listed)
    listed = Listed([1, 2], [[3], []], (4, 5), Path("a"))
    assert vars(there_and_back(listed)) == vars(listed)


def test_the_constructor_of_a_users_class_is_not_checked() -> None:
    assert Loose(nn.Identity(), more=5).more == 5
    assert Car(5).wheels == 5


def test_lists_and_numbers_of_numpy_come_back_as_plain_data() -> None:
    unet = Unet(np.int64(8), [1, 2], image_size=8)  # type: ignore[arg-type]
    assert describe(there_and_back(unet)) == describe(Unet(8, (1, 2), image_size=8))
    assert there_and_back(Car(np.float32(0.5))).wheels == 0.5
