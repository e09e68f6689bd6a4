"""Tests of a run in a given time, whose plan is fixed when the run starts."""

import json
import os
import re
import shutil
import signal
import time
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from rectified_flow.cli import distill, timing
from rectified_flow.cli import train as train_module
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.train import train as run_training
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data import store_writer
from rectified_flow.errors import UsageError
from rectified_flow.load import load_flow
from rectified_flow.runs.folder import read_config
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.signals import defer_signals, stop_on_signals
from rectified_flow.system.terminal import duration
from rectified_flow.training.clock import Clock
from tests.programs import assert_refused, constant_speed
from tests.ranks import run_on_ranks
from tests.training.runs import losses

TINY = "--image_size 8 --dim 8 --dim_mults 1 --num_samples 0 --save_every 0"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number, pixels in enumerate(np.random.default_rng(0).integers(256, size=(20, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def flags_of(run: Path) -> dict[str, Any]:
    return read_config(run / "config.json")["training"]


def train(words: str, rate: float = 100.0, measured: bool = False, timed: bool = False) -> None:
    with constant_speed(rate, measured=measured, timed=timed):
        assert run_training(read_settings(TrainConfig, "", words.split()))


def printed(words: str, timed: bool = False) -> str:
    with redirect_stdout(StringIO()) as said:
        train(words, timed=timed)
    return said.getvalue()


def test_a_run_in_a_given_time(pictures: Path, tmp_path: Path) -> None:
    """The run ends at the planned step. A second command with another budget finds nothing left to do."""
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --budget"
    run_on_ranks(2, train, f"{words} 1s")
    flags = flags_of(tmp_path / "run")
    steps = flags["train_num_steps"]
    assert (flags["optimizer"], flags["lr_decay"], flags["dim"]) == (["muon"], "cosine", 8)
    assert flags["global_batch_size"] == 16
    assert "budget" not in flags, "the number of steps is what determines the run"
    assert (tmp_path / f"run/checkpoints/step_{steps:08}").is_dir()
    said, _ = run_on_ranks(2, printed, f"{words} 1h")
    assert flags_of(tmp_path / "run")["train_num_steps"] == steps
    assert f"a larger `train_num_steps`, such as {2 * steps}, in place of `budget` and `one_step`\n" in said
    longer = words.replace("--budget", f"--train_num_steps {steps + 1}")
    run_on_ranks(2, train, longer)
    assert (tmp_path / f"run/checkpoints/step_{steps + 1:08}").is_dir()


def test_the_clock_changes_the_number_of_steps_of_all_processes(pictures: Path, tmp_path: Path) -> None:
    """However fast the machine is: the run ends at the step that the clock decided last."""
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --budget 4s"
    run_on_ranks(2, train, words, 200.0, False, True)
    clock = json.loads((tmp_path / "run/clock.json").read_text())
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert clock["planned"] == flags_of(tmp_path / "run")["train_num_steps"]
    total = [clock["planned"], *(total for _, total in clock["changes"])][-1]
    assert (status["state"], status["step"], status["total_steps"]) == ("finished", total, total)
    assert clock["used"] > 0


def test_a_run_that_is_killed_before_its_first_checkpoint_has_the_rest_of_its_time(
    pictures: Path, tmp_path: Path
) -> None:
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --budget 4s"
    run_on_ranks(1, train, words, 200.0, False, True)
    shutil.rmtree(tmp_path / "run/checkpoints")
    clock = json.loads((tmp_path / "run/clock.json").read_text())
    assert clock["saved"], "the time of a run whose checkpoints were moved away is not that of the run that begins anew"
    assert Clock.used_before(tmp_path / "run", 4.0, saved=False) == 0
    (tmp_path / "run/clock.json").write_text(json.dumps(clock | {"used": 1.5, "saved": False}))
    [said] = run_on_ranks(1, printed, words, True)
    assert "clock       1.5 s of the budget had been used before the run was killed" in said
    again = json.loads((tmp_path / "run/clock.json").read_text())
    assert again["used"] > 1.5
    assert again["asked"] == 4


def train_while_another_ends(words: str, run: Path, saved: Path) -> None:
    """Train while another process holds the folder, which then saves its first checkpoint and ends."""
    with FileLock(run / ".run.lock", thread_local=False) as held:

        def end() -> None:
            saved.rename(run / "checkpoints")
            held.release()

        Timer(0.5, end).start()
        train(words, 400.0)


def test_a_command_that_is_repeated_while_the_first_one_ends_resumes_its_run(pictures: Path, tmp_path: Path) -> None:
    """The second command makes no new plan, whose length would differ since the machine is faster now."""
    run, saved = tmp_path / "run", tmp_path / "saved"
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {run} --budget 1s"
    run_on_ranks(1, train, words)
    steps = flags_of(run)["train_num_steps"]
    (run / "checkpoints").rename(saved)
    run_on_ranks(1, train_while_another_ends, words, run, saved)
    assert json.loads((run / "status.json").read_text())["total_steps"] == steps
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == [f"step_{steps:08}"]


def train_slowly(words: str, clock: Path, ends: str) -> None:
    """Train, but end at the first picture, once the clock is recorded: by a kill, or by an error."""

    def decoded(*_: object) -> None:
        while not clock.exists():
            time.sleep(0.02)
        if ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a broken picture")

    with patch.object(timing, "RECORD_EVERY", 0.05), patch.object(store_writer, "_decoded", decoded):
        train(words, timed=True)


@pytest.mark.parametrize("ends", ["killed", "failed"])
def test_time_that_was_spent_on_reading_counts_after_a_kill(pictures: Path, tmp_path: Path, ends: str) -> None:
    clock = tmp_path / "run/clock.json"
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --budget 4s"
    process = get_context("spawn").Process(target=train_slowly, args=(words, clock, ends))
    process.start()
    process.join(60)
    process.kill()
    if ends == "failed":
        assert process.exitcode == 1
        assert not clock.exists(), "a run that is started again after an error has all of its time"
        return
    assert process.exitcode == -signal.SIGKILL
    used = json.loads(clock.read_text())["used"]
    assert used > 0
    [said] = run_on_ranks(1, printed, words, True)
    assert f"clock       {duration(used)} of the budget had been used before the run was killed" in said
    assert json.loads(clock.read_text())["used"] > used


def test_time_is_recorded_again_once_the_disk_has_room(tmp_path: Path) -> None:
    calls, run = list[int](), TrainingConfig(output_dir=tmp_path)

    def full_at_first(config: TrainingConfig) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise UsageError("there is no space")

    quick, full = patch.object(timing, "RECORD_EVERY", 0.01), patch.object(timing, "prepare_folders", full_at_first)
    with quick, full, timing.time_recorded(run, Clock(60.0)):
        while not (tmp_path / "clock.json").exists():
            time.sleep(0.01)
    assert len(calls) >= 3


def test_a_generator_that_was_killed_before_it_began_keeps_its_part_of_the_budget(tmp_path: Path) -> None:
    (tmp_path / "one-step").mkdir()
    Clock(100.0, used=5.0).write(tmp_path / "one-step", 0)
    settings = train_module.one_step_of(TrainingConfig(output_dir=tmp_path), {}, 150.0, spent=20.0)
    assert timing.budget_of(settings.values.program) == 100
    new = train_module.one_step_of(TrainingConfig(output_dir=tmp_path), {}, 150.0, spent=160.0, is_new=True)
    assert timing.budget_of(new.values.program) == 140


def test_the_recorded_flags_give_the_same_run(pictures: Path, tmp_path: Path) -> None:
    """The networks that were measured for the plan change nothing in the run."""
    words = f"--cache_dir {tmp_path}/cache --output_dir {tmp_path}"
    planned = f"--dataset_path {pictures} --image_size 8 --num_samples 0 --save_every 0 --log_every 1 --budget 1s"
    run_on_ranks(1, train, f"{planned} {words}/planned", 100.0, True)
    run_on_ranks(1, train, f"--config {tmp_path}/planned/config.json {words}/again")
    assert losses(tmp_path / "planned") == losses(tmp_path / "again")


def train_with(module: str, words: str) -> None:
    """Train with the custom parts of a module."""
    import_module(module)
    train(f"{words} --import {module}")


def test_a_transformer_of_ones_own_is_planned_and_trained(pictures: Path, tmp_path: Path) -> None:
    """The plan chooses its width, its layers and its patches, which the run records and builds."""
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache --image_size 32 --num_samples 0 --save_every 0"
    words += f" --network PatchTransformer --log_every 1 --budget 2s --output_dir {tmp_path}/run"
    run_on_ranks(1, train_with, "tests.extension.own_transformer", words)
    flags = flags_of(tmp_path / "run")
    assert flags["network"] == ["PatchTransformer", "width=32", "layers=3", "patch=2"]
    assert len(losses(tmp_path / "run")) == flags["train_num_steps"] > 1
    import_module("tests.extension.own_transformer")
    flow = load_flow(tmp_path / "run")
    assert (type(flow.network).__name__, len(flow.network.blocks)) == ("PatchTransformer", 3)  # type: ignore[arg-type]
    assert flow.sample(2, steps=1).shape == (2, 3, 32, 32)


def test_a_run_that_starts_from_another_has_its_network(pictures: Path, tmp_path: Path) -> None:
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache --image_size 8 --num_samples 0 --save_every 0"
    words += " --budget 1s"
    run_on_ranks(1, train, f"{words} --dim 12 --dim_mults 1 2 --output_dir {tmp_path}/first")
    run_on_ranks(1, train, f"{words} --init_from {tmp_path}/first --output_dir {tmp_path}/second")
    flags = flags_of(tmp_path / "second")
    assert (flags["dim"], flags["dim_mults"]) == (12, [1, 2])


def test_large_pictures_are_trained_on_as_latents_from_the_starter(tmp_path: Path) -> None:
    # 5,400 images are fewer than 200 passes over 28 pictures, so that the run is not augmented.
    for number, pixels in enumerate(np.random.default_rng(0).integers(256, size=(28, 3, 3, 3), dtype=np.uint8)):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        smooth = Image.fromarray(pixels).resize((150, 130), Image.Resampling.BICUBIC)  # the autoencoder spoils noise
        smooth.save(tmp_path / f"pictures/{number}.png")
    words = f"--dataset_path {tmp_path}/pictures --cache_dir {tmp_path}/cache --output_dir {tmp_path}/run --dry_run"
    said = printed(f"{words} --budget 1m")
    assert not (tmp_path / "run").exists(), "a dry run"
    assert "size        --image_size 128 --autoencoder small: about 5,400 images in 1.0 minutes" in said
    assert re.search(r"starters/small/step_\d+: ([\d,]+) of \1 weights", said), "all of them are initialised"


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_and_its_map_in_one_command(world_size: int, pictures: Path, tmp_path: Path) -> None:
    """The mean flow learns from the run; the same command again finds nothing left to do in either."""
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --seed 3"
    words += " --mixed_precision bf16 --budget 2s --one_step"
    run_on_ranks(world_size, train, words, 300.0, world_size == 2)
    teacher, student = flags_of(tmp_path / "run"), flags_of(tmp_path / "run/one-step")
    assert teacher["mixed_precision"] == "bf16"
    assert student["mixed_precision"] == "bf16", "as given, though bf16 is not faster here"
    assert (student["seed"], student["dim"]) == (3, 8)
    assert student["teacher"].startswith(f"{tmp_path}/run")
    states = [json.loads((tmp_path / folder / "status.json").read_text()) for folder in ("run", "run/one-step")]
    assert [state["state"] for state in states] == ["finished"] * 2
    before = losses(tmp_path / "run/one-step")
    run_on_ranks(world_size, train, words)
    assert losses(tmp_path / "run/one-step") == before


@pytest.mark.parametrize("flags", ["--num_epochs 3 --teacher_samples 64 --global_batch_size 8", "--budget 20s"])
def test_the_length_of_a_run_on_samples_of_a_teacher(flags: str, pictures: Path, tmp_path: Path) -> None:
    """An epoch has the samples of the teacher, with the number that the plan has chosen."""
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run"
    run_on_ranks(1, train, f"{words} --train_num_steps 1")
    said = printed(f"--method reflow --teacher {tmp_path}/run --output_dir {tmp_path}/reflow --dry_run {flags}")
    (steps, images, epochs), *_ = re.findall(r"run +(\d+) steps = (\d+) images = ([\d.]+) epochs", said)
    if "--num_epochs" in flags:
        assert (steps, images, epochs) == ("24", "192", "3.0")
        assert "time        80 ms a step, 1.9 s in all" in said
    else:
        [samples] = re.findall(r"draws ([\d,]+) samples", said)
        assert float(epochs) == pytest.approx(int(images) / int(samples.replace(",", "")), abs=0.06)


def budgets(folder: Path, budget: str, *clocks: str, **times: float) -> list[str | None]:
    """Return the budgets of both runs of a command in a folder whose runs have clocks with these times."""
    for name in clocks:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "clock.json").write_text(json.dumps({"planned": 9, **times}))
    words = f"--dataset_path pictures --one_step --budget {budget} --output_dir {folder}"
    with (
        patch.object(train_module, "check_one_step"),
        patch.object(train_module, "train_run", return_value=True) as trained,
    ):
        assert train_module.train(read_settings(TrainConfig, "", words.split()))
    return [call.args[0].values.program.budget for call in trained.call_args_list]


def test_the_second_run_has_the_time_that_is_left(tmp_path: Path) -> None:
    """Its budget is what the clock of the first run leaves, including the time before a kill."""
    assert budgets(tmp_path, "1h", ".", seconds=2400.0, asked=1800.0, used=2400.0) == ["1h", "20m"]


def test_another_budget_is_that_of_both_runs(tmp_path: Path) -> None:
    assert budgets(tmp_path, "3h", ".", "one-step", seconds=1800.0, asked=1800.0, used=1700.0) == ["3h", "1h30m"]


def test_a_stop_at_the_end_of_the_first_run_stops_the_command(tmp_path: Path) -> None:
    def stopped(*_: object) -> bool:
        with defer_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    words = f"--dataset_path pictures --one_step --budget 1h --output_dir {tmp_path}"
    with (
        stop_on_signals(),
        patch.object(train_module, "check_one_step"),
        patch.object(train_module, "train_run", side_effect=stopped) as trained,
    ):
        assert not train_module.train(read_settings(TrainConfig, "", words.split()))
    assert trained.call_count == 1


def test_a_copy_of_both_runs_is_finished_and_pictures_may_move(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "here")
    words = f"--dataset_path {tmp_path}/here --cache_dir {tmp_path}/cache {TINY} --seed 3 --one_step --budget 2s"
    run_on_ranks(1, train, f"{words} --output_dir {tmp_path}/run", 300.0)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "here").rename(tmp_path / "moved")
    before = losses(tmp_path / "run/one-step")
    words = words.replace("/here", "/moved")
    for folder in ("run", "copy"):
        run_on_ranks(1, train, f"{words} --output_dir {tmp_path}/{folder}")
        assert losses(tmp_path / folder / "one-step") == before


def test_a_run_with_checkpoints_elsewhere_and_its_map_resume(pictures: Path, tmp_path: Path) -> None:
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --seed 3"
    words += f" --one_step --budget 2s --checkpoint_dir {tmp_path}/elsewhere"
    run_on_ranks(1, killed_while_drawing, words)
    run_on_ranks(1, train, words, 100.0)
    assert json.loads((tmp_path / "run/one-step/status.json").read_text())["state"] == "finished"


def killed_while_drawing(words: str) -> None:
    """Train on a fast machine until the teacher's first samples, as if the process were killed there."""
    with patch.object(distill._Generator, "rows", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        train(words, 300.0)


def test_a_run_that_is_killed_while_its_teacher_draws_keeps_its_plan(pictures: Path, tmp_path: Path) -> None:
    words = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/run --seed 3"
    run, words = tmp_path / "run/one-step", f"{words} --one_step --budget 2s"
    run_on_ranks(1, killed_while_drawing, words)
    planned = flags_of(run)
    assert not (run / "checkpoints").exists() or not list((run / "checkpoints").glob("step_*"))
    assert json.loads((run / "clock.json").read_text())["planned"] == planned["train_num_steps"]
    run_on_ranks(1, train, words, 100.0)
    finished = flags_of(run)
    assert {name for name in planned if planned[name] != finished[name]} <= {"data_seed"}
    assert (run / f"checkpoints/step_{planned['train_num_steps']:08}").is_dir()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("config.json", "config.json would be overwritten, and this project did not write it"),
        ("run", "belongs to a run with --method rectified"),
        ("paths/mine.txt", "paths is in the way of the paths, and holds mine.txt"),
    ],
)
def test_a_folder_of_something_else_for_the_one_step_run_is_refused_before_training(
    name: str, sentence: str, pictures: Path, tmp_path: Path
) -> None:
    data = f"--dataset_path {pictures} --cache_dir {tmp_path}/cache {TINY}"
    folder = tmp_path / "run/one-step"
    if name == "run":
        run_on_ranks(1, train, f"{data} --train_num_steps 1 --output_dir {folder}")
    else:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    assert_refused("train_oxford.py", 1, f"{data} --output_dir {tmp_path}/run --one_step --budget 2s", sentence)
    assert not (tmp_path / "run/checkpoints").exists()
