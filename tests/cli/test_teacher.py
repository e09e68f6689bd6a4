"""Tests of training on paths or pairs of a teacher, which any number of processes draws."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.build import build_flow
from rectified_flow.cli.data import data_of
from rectified_flow.cli.distill import DistillationData, open_distilled
from rectified_flow.cli.record import distillation_of, with_record
from rectified_flow.cli.settings import Settings, command_line, read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.data.store import StoreDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.errors import UsageError
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.load import load_flow
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.programs import assert_refused, planned
from tests.ranks import run_on_ranks
from tests.training.runs import losses

COUNT, STEPS, SCALE = 150, 3, 2.0
SMALL = {"dataset": "synthetic-flowers", "image_size": 8, "dim": 8, "dim_mults": (1, 2), "num_samples": 0}


def train_teacher(folder: Path, **flags: Any) -> Path:
    words = command_line(SMALL | {"train_num_steps": 3, "output_dir": folder} | flags)
    run_on_ranks(1, train, read_settings(TrainConfig, "", words))
    return folder


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train a conditional flow on tiny flowers for each method of a student; one of the flows is augmented."""
    return {
        "distill": train_teacher(tmp_path_factory.mktemp("teacher"), use_cfg=True, augment=0.15),
        "reflow": train_teacher(tmp_path_factory.mktemp("clean"), use_cfg=True, prediction="clean"),
    }


def flags_of(method: str, teacher: Path, output_dir: Path, **flags: Any) -> Settings[OneStepConfig]:
    more: dict[str, Any] = {"teacher_samples": COUNT, "teacher_steps": STEPS, "num_samples": 0, "log_every": 3}
    more |= {"guidance_scale": SCALE} if method == "distill" else {}
    given = {"method": method, "teacher": teacher, "output_dir": output_dir} | more | flags
    return read_settings(OneStepConfig, "", command_line(given))


def request_of(settings: Settings[OneStepConfig]) -> tuple[OneStepConfig, DistillationData]:
    values = with_record(settings)[0].values
    request = distillation_of(values)
    assert request is not None
    return values, request


def open_data(settings: Settings[OneStepConfig]) -> Any:
    """Draw the data of a teacher, unless they are there, and return them."""
    values, request = request_of(settings)
    pictures: Any = data_of(values.data, values.source, values.columns).open()
    space = request.space_of_teacher()
    return open_distilled(request, pictures, space, (0.0, 0), values.run.mixed_precision or "no")


def draw(method: str, teacher: Path, output_dir: Path, **flags: Any) -> Path:
    path: Path = open_data(flags_of(method, teacher, output_dir, **flags)).path
    return path


@pytest.fixture(scope="module")
def drawn(teachers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoreDataset]:
    """The data of each teacher, drawn by two processes."""
    stores = {}
    for method, teacher in teachers.items():
        path, other = run_on_ranks(2, draw, method, teacher, tmp_path_factory.mktemp("run"))
        assert path == other
        stores[method] = StoreDataset(path)
    return stores


def test_a_path_is_the_teachers_with_its_guidance(teachers: dict[str, Path], drawn: dict[str, StoreDataset]) -> None:
    batch = drawn["distill"].read_batch([3, 149, 70])
    assert set(batch) == {"images", "labels", "path"}
    assert (batch["path"].dtype, batch["path"].shape) == (torch.float16, (3, STEPS, 3, 8, 8))
    seen: list[tuple[float, Tensor]] = []
    images = load_flow(teachers["distill"], RectifiedFlow).sample(
        noise=batch["path"][:, 0].float(),
        labels=batch["labels"],
        steps=STEPS,
        guidance=Guidance(SCALE),
        watch=lambda t, x: seen.append((t, x)),
    )
    assert [t for t, _ in seen] == pytest.approx([1, 2 / 3, 1 / 3, 0]), "not the times that the flow learns them at"
    for point, (_, x) in zip(batch["path"].unbind(1), seen[:-1], strict=True):
        torch.testing.assert_close(point.float(), x, rtol=1e-2, atol=1e-2)
    assert (images.mul(255) - batch["images"]).abs().max() < 1
    assert drawn["distill"].read_batch(range(COUNT))["path"][:, 0].float().std() == pytest.approx(1, abs=0.02)


def test_a_pair_is_what_the_flow_makes_of_its_noise(teachers: dict[str, Path], drawn: dict[str, StoreDataset]) -> None:
    pairs = drawn["reflow"]
    assert len(pairs) == COUNT
    batch = pairs.read_batch([3, 149, 70])
    assert (batch["noise"].dtype, batch["noise"].shape) == (torch.float16, (3, 3, 8, 8))
    flow = load_flow(teachers["reflow"], RectifiedFlow)
    images = flow.sample(noise=batch["noise"].float(), labels=batch["labels"], steps=STEPS)
    assert (images.mul(255) - batch["images"]).abs().max() < 1, "not the flow's picture of that noise and label"
    everything = pairs.read_batch(range(COUNT))
    assert everything["noise"].float().std() == pytest.approx(1, abs=0.02)
    assert len(everything["noise"].flatten(1).unique(dim=0)) == COUNT
    assert 5 < len(everything["labels"].unique()) <= 12


def test_paths_begin_at_other_noise_than_samples(drawn: dict[str, StoreDataset]) -> None:
    """Samples and evaluations of a map show no rows of its training, even with the seed of its paths."""
    numbers = list(range(64))
    with randomness.deterministic(randomness.Samples(0, numbers)):
        noise = randomness.randn("sample noise", (64, 3, 8, 8), torch.device("cpu"))
    trained = drawn["distill"].read_batch(numbers)["path"][:, 0].float()
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), trained.flatten())))[0, 1]) < 0.05


def test_a_teacher_is_guided_by_its_early_checkpoint(tmp_path: Path) -> None:
    """The paths are those of autoguidance, and paths of another scale are refused."""
    run = {"train_num_steps": 8, "save_every": 1, "ema_decay": 0, "lr_warmup_steps": 0, "learning_rate": 1e-2}
    teacher = train_teacher(tmp_path / "teacher", **run)
    PartialState()
    config = flags_of("distill", teacher, tmp_path / "run", guidance_scale=1, teacher_samples=64)
    assert request_of(config)[1].calls == 2 * STEPS  # autoguidance is the default
    other = flags_of("distill", teacher, tmp_path / "run", guidance_scale=1, autoguidance=1)
    assert request_of(other)[1].calls == STEPS
    batch = open_data(config).read_batch(range(4))
    early = load_flow(teacher / "checkpoints/step_00000001", RectifiedFlow)
    flow, noise = load_flow(teacher, RectifiedFlow), batch["path"][:, 0].float()
    for scale, near in ((1.5, True), (1.0, False)):
        guidance = Guidance(autoguidance=scale, earlier=early.exact_velocity)
        images = flow.sample(noise=noise, steps=STEPS, grid="edm", guidance=guidance)
        assert bool((images.mul(255) - batch["images"]).abs().max() < 1) == near
    for folder, grid in ((tmp_path / "edm", "edm"), (tmp_path / "plain", "uniform")):  # a map is sampled at these times
        scale = 1.5 if grid == "edm" else 1
        train(flags_of("distill", teacher, folder, guidance_scale=1, autoguidance=scale, train_num_steps=1))
        assert load_flow(folder).default_grid == grid
    assert_refused(
        "train_mean_flow.py",
        1,
        f"--teacher {teacher} --autoguidance 2 --teacher_samples 64 --teacher_steps 3 --output_dir {tmp_path}/run",
        "differ in autoguidance (1.5 stored, 2",
    )


def learn(method: str, teacher: Path, output_dir: Path, teacher_dir: Path | None, steps: int) -> None:
    flags = {"teacher_dir": teacher_dir, "batch_size": 16, "learning_rate": 1e-4, "lr_warmup_steps": 0}
    train(flags_of(method, teacher, output_dir, train_num_steps=steps, **flags))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("distill", {"kind": "DistilledFlow", "whole_fraction": 0.5}),
        (
            "reflow",
            {"distance": "pseudo_huber", "prediction": "clean"}
            | {"time_distribution": {"kind": "UShaped", "steepness": 4.0}},
        ),
    ],
)
def test_training_starts_from_the_teacher(
    method: str, expected: dict[str, Any], teachers: dict[str, Path], drawn: dict[str, StoreDataset], tmp_path: Path
) -> None:
    run_on_ranks(1, learn, method, teachers[method], tmp_path, drawn[method].path, 6)
    assert list(losses(tmp_path)) == [3, 6]
    description = json.loads((tmp_path / "checkpoints/step_00000006/flow.json").read_text())
    assert expected.items() <= description.items()
    earlier, later = (load_flow(run).state_dict() for run in (teachers[method], tmp_path))
    augmented = {"network.augmentation_embedding.weight"} if method == "distill" else set()
    assert earlier.keys() - later.keys() == augmented, "the data of a teacher are not augmented"
    for name, weights in later.items():
        assert (earlier[name] - weights).abs().max() < 6.1e-4, "not the weights of the teacher, six steps later"


def test_a_teacher_must_predict_the_velocity(teachers: dict[str, Path], tmp_path: Path) -> None:
    flags = f"--teacher {teachers['reflow']} --output_dir {tmp_path}"
    assert_refused("train_mean_flow.py", 1, flags, "predicts clean: pass a run that predicts velocity")


def killed_at_first(method: Callable[..., None], applies: Callable[..., bool]) -> Callable[..., None]:
    """Return a method of the writer that is interrupted after its first call to which that applies."""

    def die(writer: StoreWriter, *arguments: Any) -> None:
        method(writer, *arguments)
        if applies(*arguments):
            raise KeyboardInterrupt

    return die


def test_one_process_that_was_killed_draws_the_same(
    teachers: dict[str, Path], drawn: dict[str, StoreDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState()
    with monkeypatch.context() as patch:
        patch.setattr(
            StoreWriter, "reached", killed_at_first(StoreWriter.reached, lambda progress: progress.get("done"))
        )
        with pytest.raises(KeyboardInterrupt):
            draw("reflow", teachers["reflow"], tmp_path)
    assert not (tmp_path / "pairs").exists()
    write, written = StoreWriter.write, list[int]()

    def count(writer: StoreWriter, first: int, values: Any) -> None:
        written.append(first)
        write(writer, first, values)

    monkeypatch.setattr(StoreWriter, "write", count)
    again, pairs = StoreDataset(draw("reflow", teachers["reflow"], tmp_path)), drawn["reflow"]
    assert written == [64, 128], "it did not resume where it was"
    assert np.array_equal(again.entries["noise"], pairs.entries["noise"])
    assert np.abs(again.entries["images"].astype(int) - pairs.entries["images"]).max() <= 1
    assert np.array_equal(again.labels, pairs.labels)
    draw("reflow", teachers["reflow"], tmp_path, mixed_precision="bf16")
    assert written == [64, 128], "they were there already"


def test_altered_pairs_are_refused(drawn: dict[str, StoreDataset], teachers: dict[str, Path], tmp_path: Path) -> None:
    PartialState()
    path = shutil.copytree(drawn["reflow"].path, tmp_path / "pairs")
    noise = path / "noise.float16"
    altered = bytes(100) + noise.read_bytes()[100:]
    noise.write_bytes(altered)
    os.utime(noise, (0, 0))
    with pytest.raises(UsageError, match=r"pairs is damaged \(noise.float16 was altered\): move the folder away"):
        draw("reflow", teachers["reflow"], tmp_path)
    assert noise.read_bytes() == altered


def test_a_run_resumes_when_its_teacher_is_gone(teachers: dict[str, Path], tmp_path: Path) -> None:
    """The same command, though another training has gone on in the teacher's folder meanwhile, or it was removed."""
    mine = Path(shutil.copytree(teachers["reflow"], tmp_path / "teacher"))
    run_on_ranks(1, learn, "reflow", mine, tmp_path / "run", None, 3)
    shutil.copytree(mine / "checkpoints/step_00000003", mine / "checkpoints/step_00000009")
    run_on_ranks(1, learn, "reflow", mine, tmp_path / "run", None, 4)
    shutil.rmtree(mine)
    run_on_ranks(1, learn, "reflow", mine, tmp_path / "run", None, 6)
    assert list(losses(tmp_path / "run")) == [3, 4, 6]


def test_a_run_whose_teacher_trained_on_and_moved_says_how_to_resume(teachers: dict[str, Path], tmp_path: Path) -> None:
    """The checkpoint that it learned from is no longer there, so nothing proves that the folder is the teacher's."""
    mine, run = Path(shutil.copytree(teachers["reflow"], tmp_path / "teacher")), tmp_path / "run"
    run_on_ranks(1, learn, "reflow", mine, run, None, 3)
    moved, known = mine.rename(tmp_path / "moved"), mine / "checkpoints/step_00000003"
    (moved / "checkpoints/step_00000003").rename(moved / "checkpoints/step_00000009")
    refusal = f"the teacher of {run} is {known}: pass this path to resume, even if it no longer exists"
    assert_refused("train_mean_flow.py", 1, f"--method reflow --teacher {moved} --output_dir {run}", refusal)
    run_on_ranks(1, learn, "reflow", known, run, None, 4)
    assert list(losses(run)) == [3, 4]


@pytest.mark.parametrize(("scale", "default"), [(1, 2.0), (3, 1.0)])
def test_guided_pairs_leave_nothing_to_guide(scale: int, default: float) -> None:
    """The default scale of captions is applied to a student whose teacher was not guided, and is not applied twice."""
    words = f"--teacher none --method reflow --guidance_scale {scale} --condition_on text --dim 8 --dim_mults 1"
    values = read_settings(OneStepConfig, "", [*words.split(), "--image_size", "8"]).values
    caption = Caption(BagOfWords(("red",)), 2, 0, ("red",))
    assert build_flow(values, {"text": caption}, Pixels((3, 8, 8))).default_guidance == default


def test_paths_that_exist_keep_their_precision(
    teachers: dict[str, Path], drawn: dict[str, StoreDataset], tmp_path: Path
) -> None:
    """A run on the paths of another one measures the speeds again, and bf16 may be faster then."""
    PartialState()
    words = f"--teacher {teachers['distill']} --teacher_dir {drawn['distill'].path} --output_dir {tmp_path}"
    config = read_settings(OneStepConfig, "", f"{words} --budget 10m".split())
    run = planned(config, 1000, lambda config: 20.0 if config.run.mixed_precision == "bf16" else 10.0).run
    assert run.mixed_precision == "no"
