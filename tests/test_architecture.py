"""Imports run one way, as docs/architecture.md has it; the command line is parsed without torch."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "rectified_flow"
FLOORS = [
    {"cli"},
    {"training"},
    {"evaluation"},
    {"flows"},
    {"runs", "distributed", "data"},
    {"spaces", "networks"},
    {path.stem for path in PACKAGE.glob("*.py")} | {"system"},
]
"""From the top down; what stands on one floor may import each other."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    """``flows`` of ``rectified_flow.flows.mean``."""
    return module.split(".")[1]


def imports_of(path: Path) -> list[str]:
    """The modules of this package that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in typing_only and node.module:
            if node.module == "rectified_flow":
                found += [f"rectified_flow.{alias.name}" for alias in node.names]
            elif node.module.startswith("rectified_flow."):
                found.append(node.module)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_from_a_floor_above(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = [module for module in imports_of(path) if FLOOR[room_of(module)] < FLOOR[room]]
    assert not above, "an import against the direction"


@pytest.mark.parametrize("room", ["flows", "spaces", "networks"])
def test_data_and_flows_know_nothing_of_other_processes(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        assert "torch.distributed" not in path.read_text(), path
        assert not [module for module in imports_of(path) if room_of(module) == "distributed"], path


def test_flows_know_nothing_of_where_data_come_from() -> None:
    for path in (PACKAGE / "flows").glob("*.py"):
        assert not [module for module in imports_of(path) if room_of(module) == "data"], path
