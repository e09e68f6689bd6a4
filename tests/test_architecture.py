"""Tests of the imports of the package: their direction, and the modules that model code loads."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

from rectified_flow import rooms
from scripts.house import circle, files_in, flag_strings, functions, takes_all_settings, untyped
from tests.patience import PATIENCE

PACKAGE = Path(__file__).resolve().parent.parent / "rectified_flow"
ROOMS = [room.rpartition(".")[2] for room in rooms.ROOMS]
"""Folders that register their classes, and that the programs do without."""
DOORS = {"", "__main__", "rooms"}
"""Modules through which the package is entered: they may name any module. The package itself is the first."""
LEAVES = {path.stem for path in PACKAGE.glob("[!_]*.py")} - {"load"} - DOORS
FLOORS = [
    {"cli", "studio", *DOORS},
    {"training"},
    {*ROOMS},
    {"evaluation", "export"},
    {"load", "hub"},
    {"runs", "distributed", "data"},
    {"flows"},
    {"spaces", "networks"},
    LEAVES | {"system"},
]
"""From the top down. A module imports, directly or through others, no module of a floor above."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = {
    ".".join(("rectified_flow", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room_of(module: str) -> str:
    """Return ``flows`` for ``rectified_flow.flows.mean``, and nothing for the package itself."""
    return [*module.split("."), ""][1]


IMPORTER = re.compile(r"^(exec|eval)$|\b(__import__|find_spec|import_module|resolve_name|run_module|run_path)$")
"""A function that imports a module by its name, as it is called."""
COMPUTED = {
    "rectified_flow": "the modules of the public names, which __init__.pyi lists",
    "rectified_flow.rooms": "the modules of ROOMS",
    "rectified_flow.cli.settings": "the modules of --import",
    "rectified_flow.cli.programs": "the module of a program",
    "rectified_flow.system.pictures": "plugins of Pillow",
}
"""Modules that import by a name which is not written where they call an :data:`IMPORTER`."""


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports when it runs."""
    return imports_in(module, MODULES[module].read_text(), is_package=MODULES[module].stem == "__init__")


def imports_in(module: str, code: str, *, is_package: bool = False) -> frozenset[str]:
    """Return the modules of this package that the code of a module imports, also inside its functions.

    A module that a string names counts as imported, since ``import_module`` and others take the names of modules. So
    does the folder of a module, whose ``__init__.py`` runs first.
    """
    tree = ast.parse(code)
    silent = typing_only(tree) | documentation(tree)
    package = module if is_package else module.rpartition(".")[0]
    constants = {"__name__": module, "__package__": package, **constants_of(tree)}
    found = set()
    for node in ast.walk(tree):
        if node in silent:
            continue
        if isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            found |= {known(f"{origin}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {known(alias.name) for alias in node.names}
        elif (text := text_of(node, constants)) is not None:
            names = re.findall(r"rectified_flow(?:\.\w+)+", text)
            found |= {known(name) for name in names} - {PACKAGE.name}  # as in @rectified_flow.register
    folders = {name.rpartition(".")[0] for name in found} - {PACKAGE.name}  # the package itself imports nothing yet
    return frozenset((found | folders) - {"", module})


def known(name: str) -> str:
    """Return the module of this package that ``name`` is or is defined in; an empty text for other packages."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def typing_only(tree: ast.AST) -> set[ast.AST]:
    """Return what only type checkers read."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def documentation(tree: ast.AST) -> set[ast.AST]:
    """Return the docstrings, also those of attributes."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Return the names of a module that stand for a text."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def text_of(node: ast.AST, constants: dict[str, str]) -> str | None:
    """Return the text of a literal, in which the names of constants are replaced and other values are left out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        values = (each.value if isinstance(each, ast.FormattedValue) else each for each in node.values)
        names = (constants.get(each.id, "") if isinstance(each, ast.Name) else text_of(each, {}) for each in values)
        return "".join(name or "" for name in names)
    return None


def calls_by_computed_names(code: str) -> list[str]:
    """Return the calls that import a module whose name is not written there, as code."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    computed = [call for call in calls if not (call.args and isinstance(call.args[0], ast.Constant))]
    return [ast.unparse(call) for call in computed if IMPORTER.search(ast.unparse(call.func))]


def closure_of(module: str) -> dict[str, str]:
    """Return all modules that a module imports, directly or through others, each with one that imports it."""
    importers: dict[str, str] = {}
    waiting = [module]
    while waiting:
        importer = waiting.pop()
        for imported in sorted(imports_of(importer) - importers.keys()):
            importers[imported] = importer
            waiting.append(imported)
    return importers


def chain(importers: dict[str, str], module: str, start: str) -> str:
    """Return ``a < b < c`` for a module ``a`` that ``c`` imports through ``b``."""
    names = [module]
    while names[-1] != start:
        names.append(importers[names[-1]])
    return " < ".join(names)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_a_floor_above(module: str) -> None:
    importers = closure_of(module)
    above = [each for each in importers if FLOOR[room_of(each)] < FLOOR[room_of(module)]]
    assert not above, [chain(importers, each, module) for each in above]


@pytest.mark.parametrize(
    "code",
    [
        "from rectified_flow.cli import export",
        "from rectified_flow.cli.export import export",
        "import rectified_flow.cli.export",
        "from ..cli import export",
        "def late():\n    from rectified_flow.cli.export import export",
        "def late():\n    return import_module('rectified_flow.cli.export')",
        "def late():\n    return resolve_name('rectified_flow.cli.export:export')",
        "ROOF = 'rectified_flow.cli'\ndef late():\n    return resolve_name(f'{ROOF}.export:export')",
        "WORDS = [sys.executable, '-m', 'rectified_flow.cli.export']",
    ],
)
def test_every_way_to_import_is_seen(code: str) -> None:
    """The closure of the module is then refused, since cli is a floor above."""
    assert "rectified_flow.cli.export" in imports_in("rectified_flow.text.caption", code)


def test_a_public_name_is_an_import_of_the_front_door() -> None:
    assert imports_in("rectified_flow.load", "from rectified_flow import load_flow, randomness") == {
        "rectified_flow",
        "rectified_flow.randomness",
    }
    assert FLOOR[room_of("rectified_flow")] == 0


@pytest.mark.parametrize(
    "code", ['"See rectified_flow.cli.export."', "if TYPE_CHECKING:\n    import rectified_flow.cli"]
)
def test_what_does_not_run_is_no_import(code: str) -> None:
    assert imports_in("rectified_flow.text.caption", code) == frozenset()


def test_few_modules_import_by_a_name_that_is_not_written_there() -> None:
    assert {module for module, path in MODULES.items() if calls_by_computed_names(path.read_text())} == COMPUTED.keys()


def test_the_registry_imports_no_module_that_registers() -> None:
    assert closure_of("rectified_flow.registry").keys() == {"rectified_flow.arguments", "rectified_flow.errors"}
    assert calls_by_computed_names(MODULES["rectified_flow.registry"].read_text()) == []


@pytest.mark.parametrize(("one", "other"), [("networks", "spaces"), ("spaces", "networks")])
def test_networks_and_spaces_do_not_import_each_other(one: str, other: str) -> None:
    for module in MODULES:
        if room_of(module) == one:
            assert not [each for each in closure_of(module) if room_of(each) == other], module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_imported_by_its_own_files_alone(room: str) -> None:
    importers = {room_of(module) for module in MODULES if room in map(room_of, imports_of(module))}
    assert importers - {"rooms"} <= {room}


def test_the_studio_is_imported_by_its_row_in_the_table_of_programs_alone() -> None:
    importers = {module for module in MODULES if "studio" in map(room_of, imports_of(module))}
    assert {module for module in importers if room_of(module) != "studio"} == {"rectified_flow.cli.programs"}


@pytest.mark.parametrize("room", ["flows", "spaces", "networks"])
def test_model_code_has_no_processes(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        assert "torch.distributed" not in path.read_text(), path


HEAVY = {"accelerate", "filelock", "huggingface_hub", "pydantic", "tyro", "psutil", "PIL", "datasets", "torchvision"}


MODEL_CODE = {
    "from rectified_flow.networks.unet import Unet": 11,
    "from rectified_flow.flows.rectified import RectifiedFlow": 20,
    "from rectified_flow.flows.mean import MeanFlow": 22,
}
"""Import statements, each with the largest number of modules of the package that it may load."""


@cache
def loaded_by_model_code() -> dict[str, set[str]]:
    """Return the names of the modules that each statement loads in a process with torch and einops alone."""
    code = f"""
import os, sys, torch, torch.utils.checkpoint, einops
before = {{*sys.modules}}
for statement in {[*MODEL_CODE]!r}:
    if not os.fork():
        exec(statement)
        print(statement, *sys.modules.keys() - before, sep=";", flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(1)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PACKAGE.parent, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return {statement: {*names} for statement, *names in (line.split(";") for line in done.stdout.splitlines())}


@pytest.mark.parametrize(("statement", "most"), MODEL_CODE.items())
def test_model_code_loads_few_modules_and_no_heavy_library(statement: str, most: int) -> None:
    """Libraries that torch and einops load themselves do not count."""
    loaded = loaded_by_model_code()[statement]
    own = {name for name in loaded if name.split(".")[0] == "rectified_flow"}
    assert 0 < len(own) <= most, sorted(own)
    libraries = {name.split(".")[0] for name in loaded}
    assert not libraries & HEAVY
    if statement.endswith("Unet"):
        assert libraries - sys.stdlib_module_names == {"rectified_flow", "annotated_types"}


def test_folders_do_not_import_each_other() -> None:
    assert circle(files_in("rectified_flow")) == []


def test_what_makes_code_hard_to_change_does_not_grow() -> None:
    package = files_in("rectified_flow")
    assert sum(map(takes_all_settings, functions(package))) <= 11, "pass the values that a function needs"
    assert untyped(package) <= 215, "name the type"


def test_only_the_programs_spell_a_flag() -> None:
    """Other modules name arguments, which the programs print as their flags."""
    elsewhere = [path for path in files_in("rectified_flow") if not path.is_relative_to(PACKAGE / "cli")]
    assert {path: count for path in elsewhere if (count := flag_strings([path]))} == {}


def test_the_documentation_lists_every_room() -> None:
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    for folder in {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}:
        assert f"{folder.relative_to(PACKAGE)}/" in page
