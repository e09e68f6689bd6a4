"""The folder of a run, written by hand, as watch.py finds it."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow.system.pictures import write_picture

ID = "0123456789ab"


def write_status(folder: Path, state: str = "running", **changes: Any) -> None:
    status = {"state": state, "step": 20, "total_steps": 100, "message": "", "time": now(), "id": ID}
    folder.mkdir(parents=True, exist_ok=True)
    document = {**status, "host": platform.node(), "pid": os.getpid(), **changes}
    (folder / "status.json").write_text(json.dumps(document))


def now(ago: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - ago))


def add(folder: Path, name: str, *rows: dict[str, Any], end: str = "\n") -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


def metrics(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "images_seen": 8 * step, "loss": 1 / step, "images_per_second": 4.0, "bad_steps": 0, **more}


def begin_run(folder: Path) -> Path:
    """A run of 100 steps of 8 images, at step 30."""
    write_status(folder)
    add(folder, "metrics", metrics(10), metrics(20), metrics(30, bad_steps=2))
    add(folder, "heldout", {"step": 20, "heldout_loss": 0.5, "seen_loss": 0.4, "gap": 0.1, "losses": [0.5]})
    (folder / "samples").mkdir()
    write_picture(folder / "samples" / "step_00000020.png", np.zeros((4, 4, 3), np.uint8))
    return folder
