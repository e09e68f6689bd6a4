"""Tests of the stored data of trackers: flags, metrics and grids of samples."""

import json
import sqlite3
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rectified_flow.errors import UsageError
from rectified_flow.runs import training_config
from rectified_flow.runs.training_config import TrainingConfig
from tests.programs import assert_refused, program
from tests.ranks import run_on_ranks

TINY = (
    "--image_size 8 --dim 8 --dim_mults 1 2 --batch_size 8 --augment 0 --holdout 0.4 --lr_warmup_steps 0 --log_every 2"
    " --sample_every 2 --num_samples 4 --sample_steps 1 --save_every 2"
)


@dataclass
class Stored:
    """The stored data of a run: flags, numbers by step and name, and pictures by step."""

    flags: dict[str, Any] = field(default_factory=dict)
    numbers: dict[int, dict[str, float]] = field(default_factory=dict)
    pictures: dict[int, Any] = field(default_factory=dict)


def opened(picture: Any) -> Any:
    return np.asarray(Image.open(picture).convert("RGB"))


def read_tensorboard(folder: Path) -> Stored:
    [flags] = folder.rglob("hparams.yml")
    stored = Stored(yaml.safe_load(flags.read_text()))
    events = EventAccumulator(str(flags.parent.parent), {"scalars": 0, "images": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            stored.numbers.setdefault(each.step, {})[name] = each.value
    for each in events.Images("samples"):
        stored.pictures[each.step] = opened(BytesIO(each.encoded_image_string))
    return stored


def read_trackio(folder: Path) -> Stored:
    [file] = folder.rglob("rectified-flow.db")
    with sqlite3.connect(file) as database:
        [flags] = database.execute("SELECT config FROM configs")  # of a single run
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    stored = Stored(json.loads(flags[0]))
    for step, text in rows:
        values = json.loads(text)
        if "samples" in values:
            stored.pictures[step] = opened(file.parent / "media" / values["samples"]["file_path"])
        else:
            assert step not in stored.numbers
            stored.numbers[step] = values
    return stored


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio}


@pytest.mark.parametrize("tracker", [*READERS, pytest.param("wandb", marks=pytest.mark.slow)])
def test_a_tracker_stores_flags_curves_and_pictures_of_a_resumed_run(tmp_path: Path, tracker: str) -> None:
    pytest.importorskip(tracker)
    (tmp_path / "pictures").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(256, size=(40, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(tmp_path / f"pictures/{number}.png")
    run = tmp_path / "run"
    flags = f"{TINY} --dataset_path {tmp_path}/pictures --output_dir {run} --log_with {tracker}".split()
    places = {"WANDB_DIR": str(tmp_path), "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for steps in ("4", "8"):
        words = [*flags, "--train_num_steps", steps]
        [(code, errors)] = run_on_ranks(1, program, "train_oxford.py", words, places)
        assert code == 0, errors
    if tracker == "wandb":
        assert len({file.stem for file in tmp_path.rglob("*.wandb")}) == 1, "a resumed run is another run"
        assert len([*tmp_path.rglob("offline-run-*/files/media/images/samples*.png")]) == 4
        return
    stored = READERS[tracker](tmp_path)
    given = json.loads((run / "config.json").read_text())["training"]
    del given["train_num_steps"]  # TensorBoard and Weights & Biases keep the flags of the first start
    assert {name: stored.flags[name] for name in given} == {
        name: value if isinstance(value, bool | int | float) else str(value) for name, value in given.items()
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "heldout_loss", "seen_loss", "gap"} <= lines[-1].keys()
    assert sorted(stored.numbers) == [line.pop("step") for line in lines] == [2, 4, 6, 8]
    for step, line in zip((2, 4, 6, 8), lines, strict=True):
        assert {name: stored.numbers[step].get(name) for name in line} == pytest.approx(line, rel=1e-6)
        assert (stored.pictures[step] == opened(run / f"samples/step_{step:08}.png")).all()


def test_trackio_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_config, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="`log_with` trackio needs the Python package trackio: pip install trackio"):
        TrainingConfig(log_with="trackio")


def test_a_tracker_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    """Weights & Biases has no key here."""
    words = f"{TINY} --dataset synthetic-flowers --train_num_steps 2 --output_dir {tmp_path}/run --log_with wandb"
    places = {"WANDB_DIR": str(tmp_path), "HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": ""}
    assert_refused("train_oxford.py", 1, words, "--log_with wandb could not be started (", **places)
