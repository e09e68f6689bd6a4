"""Tests of the imports of the package: their direction, and the modules that model code loads."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts.house import circle, code_lines, files_in
from tests.patience import PATIENCE

CEILING = 10_221
"""Largest number of code lines of the package, by scripts/house.py."""
PACKAGE = Path(__file__).resolve().parent.parent / "rectified_flow"
LEAVES = {path.stem for path in PACKAGE.glob("[!_]*.py")} - {"load", "hub"} | {""}
FLOORS = [
    {"cli", "__main__", "latents", "measurements", "text"},
    {"training"},
    {"evaluation"},
    {"load", "hub", "pipeline"},
    {"runs", "distributed", "data"},
    {"flows"},
    {"spaces", "networks"},
    LEAVES | {"system"},
]
"""From the top down. A module imports, directly or through others, no module of a floor above."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = ["latents", "measurements", "text"]
"""Folders that register their classes, and that the program does without."""
MODULES = {
    ".".join(("rectified_flow", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room_of(module: str) -> str:
    """Return ``flows`` for ``rectified_flow.flows.mean``, and nothing for the package itself."""
    return [*module.split("."), ""][1]


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports when it runs, also inside its functions."""
    tree = ast.parse(MODULES[module].read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found & MODULES.keys())


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


@pytest.mark.parametrize(("one", "other"), [("networks", "spaces"), ("spaces", "networks")])
def test_networks_and_spaces_do_not_import_each_other(one: str, other: str) -> None:
    for module in MODULES:
        if room_of(module) == one:
            assert not [each for each in closure_of(module) if room_of(each) == other], module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_imported_by_its_own_files_alone(room: str) -> None:
    assert not [module for module in MODULES if room_of(module) != room and room in map(room_of, imports_of(module))]


@pytest.mark.parametrize("room", ["flows", "spaces", "networks"])
def test_model_code_has_no_processes(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        assert "torch.distributed" not in path.read_text(), path


HEAVY = {"accelerate", "filelock", "huggingface_hub", "pydantic", "tyro", "psutil", "PIL", "datasets", "torchvision"}


MODEL_CODE = {
    "from rectified_flow.networks.unet import Unet": 8,
    "from rectified_flow.flows.rectified import RectifiedFlow": 20,
    "from rectified_flow.flows.mean import MeanFlow": 20,
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


def test_code_only_shrinks() -> None:
    """A change that adds code deletes as much. Lower the ceiling when the package has shrunk; never raise it."""
    assert sum(map(code_lines, files_in("rectified_flow"))) <= CEILING


def test_the_documentation_lists_every_room() -> None:
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    for folder in {path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}:
        assert f"{folder.relative_to(PACKAGE)}/" in page
