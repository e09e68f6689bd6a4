"""The program that fills the table: measurements that are there are not repeated, and cells are means over seeds."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure_steps
from measure_steps import WAYS, Flags, measure, read_rows, table


def write_rows(folder: Path, ways: tuple[tuple[int, float], ...]) -> None:
    numbers: dict[str, Any] = {"wasserstein": 0.5, "chamfer": 0.25, "as_asked": 0.5}
    others: dict[str, Any] = {f"{name}_of_others": 0.125 for name in numbers}
    rows: list[dict[str, Any]] = [
        {"geometry": "torus", "point_coupling": "drawn", "seed": seed, "steps": steps, "guidance": guidance}
        | {name: value + seed for name, value in numbers.items()}
        | others
        for seed in (0, 1)
        for steps, guidance in ways
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_cells_are_means_over_seeds(tmp_path: Path) -> None:
    write_rows(tmp_path, WAYS[:1])
    assert table(read_rows(tmp_path)).splitlines()[2] == (
        "| torus, drawn (2 seeds) | 1 / 0.75 / 100% |  |  |  | 0.125 / 0.125 / 12% |"
    )


def test_measurements_are_not_repeated(tmp_path: Path) -> None:
    write_rows(tmp_path, WAYS)
    with patch.object(measure_steps, "train", side_effect=AssertionError):
        measure(Flags(output_dir=tmp_path), {"geometry": "torus", "point_coupling": "drawn", "seed": 1})
