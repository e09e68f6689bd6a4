"""Tests of resuming: another flow is refused, and changed settings are reported."""

import json
import shutil
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from rectified_flow import Flow, Labels, MeanFlow, Pixels, RectifiedFlow, TrainingConfig, Unet, UsageError
from rectified_flow.data.degraded import Degraded
from rectified_flow.data.description import PictureData
from rectified_flow.data.open import Pictures, open_dataset
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flows.times import LogitNormal, Uniform
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE, STATE_FILE, RunIdentity, TrainerFile
from rectified_flow.runs.folder import (
    check_start,
    choose_checkpoint,
    describe_run,
    lock_folder,
    prepare_folders,
    write_status,
)
from rectified_flow.spaces.degradations import Grey
from rectified_flow.system.artifact import claimed_names


def unet(**settings: Any) -> Unet:
    return Unet(8, (1, 2), conditions={"labels": Labels(2, ("a", "b"))}, image_size=8, **settings)


def rectified(network: Unet | None = None, **settings: Any) -> RectifiedFlow:
    return RectifiedFlow(network or unet(), **{"space": Pixels((3, 8, 8), horizontal_flip=True), **settings})


def save(flow: Flow, config: TrainingConfig) -> None:
    run = RunIdentity("data", config.seed, 8, "float32")
    documents = {
        CONFIG_FILE: describe_run(config, describe(flow), []),  # type: ignore[arg-type]
        FLOW_FILE: describe(flow),
        STATE_FILE: asdict(TrainerFile(4, run=run)),
    }
    checkpoint.save(config.checkpoints, 4, {}, documents)


def resume(flow: Flow, config: TrainingConfig, batch: int = 8, precision: str = "float32") -> list[str]:
    """Return the lines that are reported."""
    output = StringIO()
    run = RunIdentity("data", config.seed, batch, precision)
    with redirect_stdout(output):
        path = choose_checkpoint(config, run, describe(flow))
    assert path is not None
    return output.getvalue().splitlines()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: MeanFlow(unet()), "flow was RectifiedFlow and is now MeanFlow"),
        (lambda: rectified(prediction="noise"), "prediction was velocity and is now noise"),
        (lambda: rectified(coupling="ot"), "coupling was independent and is now ot"),
        (lambda: rectified(distance="pseudo_huber"), "distance was mse and is now pseudo_huber"),
        (lambda: rectified(time_distribution=Uniform()), "time_distribution.kind was LogitNormal"),
        (lambda: rectified(time_distribution=LogitNormal(0.5)), "time_distribution.mean was -0.5"),
        (lambda: rectified(unet(attention_head_dim=8)), "network.attention_head_dim was 64 and is now 8"),
    ],
)
def test_another_flow_is_refused(tmp_path: Path, other: Any, words: str) -> None:
    save(rectified(), TrainingConfig(output_dir=tmp_path / "run"))
    with pytest.raises(UsageError, match=words) as refusal:
        resume(other(), TrainingConfig(output_dir=tmp_path / "run"))
    assert "choose another `output_dir`" in str(refusal.value)


def test_changes_that_are_allowed_are_reported(tmp_path: Path) -> None:
    save(rectified(), TrainingConfig(output_dir=tmp_path))
    for same in (rectified(), rectified(space=Pixels(horizontal_flip=True))):  # whose shape is learned from the data
        assert resume(same, TrainingConfig(output_dir=tmp_path)) == []
    changed = TrainingConfig(output_dir=tmp_path, learning_rate=1e-4, ema_decay=0.99, max_grad_norm=2)
    assert resume(rectified(unet(dropout=0.5), space=Pixels((3, 8, 8))), changed) == [
        "note: network.dropout was 0.0 and is now 0.5",
        "note: space.horizontal_flip was True and is now False",
        "note: learning_rate was 0.0003 and is now 0.0001",
        "note: max_grad_norm was 1.0 and is now 2.0",
        "note: ema_decay was 0.9999 and is now 0.99",
    ]
    assert resume(rectified(guided_data=True), TrainingConfig(output_dir=tmp_path)) == [
        "note: guided_data was False and is now True"
    ]
    assert resume(rectified(), TrainingConfig(output_dir=tmp_path, seed=3), 16, "bf16") == [
        "warning: the seed was 0 and is now 3: the run changes",
        "warning: the global batch was 8 and is now 16: the run changes",
        "warning: the precision was float32 and is now bf16: the run changes",
    ]


def test_a_run_with_checkpoints_elsewhere_is_not_begun_anew(tmp_path: Path) -> None:
    """A Trainer and the examples do not read the flags that a run records, and the error names its folder."""
    run, place = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"training": {"checkpoint_dir": str(place)}}))
    checkpoint.save(place, 3, {}, {checkpoint.CONFIG_FILE: {}})
    for another in (None, tmp_path / "a larger disk"):
        with pytest.raises(UsageError, match=f"the checkpoints of .*run are in {place}: pass `checkpoint_dir`"):
            check_start(TrainingConfig(output_dir=run, checkpoint_dir=another), writes=False)
    check_start(TrainingConfig(output_dir=run, checkpoint_dir=place), writes=False)


def test_a_copy_of_a_run_does_not_save_among_the_checkpoints_of_the_run(tmp_path: Path) -> None:
    """Those of the run would be removed, and the run would have the weights of its copy. Trackers keep both apart."""
    place, run, copy = tmp_path / "elsewhere", tmp_path / "run", tmp_path / "copy"
    config = TrainingConfig(output_dir=run, checkpoint_dir=place)
    with ExitStack() as held:
        lock_folder(config, held)
    name = write_status(run, "running", 1, 2)
    (run / "config.json").write_text(json.dumps({"training": {"checkpoint_dir": str(place)}}))
    checkpoint.save(place, 3, {}, {checkpoint.CONFIG_FILE: {}})
    check_start(config, writes=False)
    shutil.copytree(run, copy)
    with pytest.raises(UsageError, match=f"`checkpoint_dir` {place} has the checkpoints of {run}: choose another"):
        check_start(replace(config, output_dir=copy), writes=False)
    with ExitStack() as held, pytest.raises(UsageError, match="has the checkpoints of"):
        lock_folder(replace(config, output_dir=copy), held)
    assert write_status(copy, "running", 1, 2) != name
    shutil.copytree(place, tmp_path / "their copy")
    check_start(replace(config, output_dir=copy, checkpoint_dir=tmp_path / "their copy"), writes=False)
    moved = run.rename(tmp_path / "moved")
    check_start(replace(config, output_dir=moved), writes=False)
    assert write_status(moved, "running", 1, 2) == name


def test_a_run_whose_config_is_damaged_resumes_once_the_file_is_removed(tmp_path: Path) -> None:
    """Each checkpoint has a copy of the file; without a checkpoint, there is nothing to resume."""
    config = TrainingConfig(output_dir=tmp_path)
    prepare_folders(config)
    (tmp_path / "config.json").write_text("")
    with pytest.raises(UsageError, match=r"damaged or does not belong to a run: choose another `output_dir`"):
        check_start(config)
    save(rectified(), config)
    with pytest.raises(UsageError, match=r": remove it to resume from the checkpoints, or choose another `output_dir`"):
        check_start(config)
    (tmp_path / "config.json").unlink()
    check_start(config)
    assert resume(rectified(), config) == []


def test_the_check_of_a_start_leaves_nothing_behind(tmp_path: Path) -> None:
    config = TrainingConfig(output_dir=tmp_path / "new/run")
    check_start(config)
    (tmp_path / "mine").mkdir()
    check_start(TrainingConfig(output_dir=tmp_path / "mine", checkpoint_dir=tmp_path / "else/checkpoints"))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    (tmp_path / "file").touch()
    (tmp_path / "mine/data.png").touch()
    (tmp_path / "theirs/checkpoints").mkdir(parents=True)
    (tmp_path / "theirs/checkpoints/best").touch()
    for name, words in {
        "file": "`output_dir` .*file cannot be written",
        "file/run": "`output_dir` .*file/run cannot be written",
        "x" * 300: "x is too long: choose a shorter name",
        "mine": "data.png would be overwritten, and this project did not write it",
        "theirs": "checkpoints/best would be overwritten, and this project did not write it",
    }.items():
        with pytest.raises(UsageError, match=words):
            check_start(TrainingConfig(output_dir=tmp_path / name))
    prepare_folders(config)
    assert claimed_names(config.output_dir) >= {CONFIG_FILE, "samples"}


def test_the_degradation_of_a_dataset_is_described(tmp_path: Path) -> None:
    flowers = open_dataset("synthetic-flowers", image_size=8, cache_dir=tmp_path)
    document = describe_run(TrainingConfig(), {}, Degraded(flowers, Grey(), Pixels((3, 8, 8)), seed=5))
    data = build(document["data"])
    assert isinstance(data, PictureData)
    assert isinstance(data.degradation, Grey)
    assert data.seed == 5


def test_the_split_of_the_data_is_a_setting_of_an_evaluation(tmp_path: Path) -> None:
    flowers = open_dataset("synthetic-flowers", image_size=8, cache_dir=tmp_path)
    for split in ("train", "test"):
        data = flowers.changed(described=Pictures("synthetic-flowers", split=split))
        assert Evaluator(data, "efficientnet_lite0", num_samples=4, metrics=["agreement"]).settings["split"] == split
