"""A mean flow with a teacher: paths that are the teacher's, drawn by any number of processes, and training on them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.config import OneStepConfig, TrainConfig
from rectified_flow.cli.data import open_pictures
from rectified_flow.cli.distill import DistillationData, open_drawn
from rectified_flow.cli.record import resolved
from rectified_flow.cli.train import train
from rectified_flow.data.store import StoreDataset, StoreWriter
from rectified_flow.flags import command_line, parse
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.load import load_flow
from tests.programs import assert_refused, planned
from tests.ranks import run_on_ranks
from tests.training.runs import losses

COUNT, STEPS, SCALE = 150, 3, 2.0
SMALL = {"dataset": "synthetic-flowers", "image_size": 8, "dim": 8, "dim_mults": (1, 2), "num_samples": 0}


def train_teacher(folder: Path, **flags: Any) -> Path:
    words = command_line(SMALL | {"train_num_steps": 3, "output_dir": folder} | flags)
    run_on_ranks(1, train, parse(TrainConfig, "", words))
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a conditional rectified flow on tiny flowers, augmented as few pictures are."""
    return train_teacher(tmp_path_factory.mktemp("teacher"), use_cfg=True, augment=0.15)


def taught(teacher: Path, output_dir: Path, **flags: Any) -> OneStepConfig:
    more = {"teacher_samples": COUNT, "teacher_steps": STEPS, "guidance_scale": SCALE, "num_samples": 0, "log_every": 3}
    return parse(OneStepConfig, "", command_line({"teacher": teacher, "output_dir": output_dir} | more | flags))


def draw_paths(teacher: Path, output_dir: Path) -> Path:
    config, _ = resolved(taught(teacher, output_dir))
    request = DistillationData.of(config)
    assert request is not None
    return open_drawn(request, open_pictures(config.data), config)[0].path


@pytest.fixture(scope="module")
def paths(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> StoreDataset:
    """Drawn by two processes."""
    path, other = run_on_ranks(2, draw_paths, teacher, tmp_path_factory.mktemp("run"))
    assert path == other
    return StoreDataset(path)


def test_a_path_is_the_teachers_with_its_guidance(teacher: Path, paths: StoreDataset) -> None:
    batch = paths.read_batch([3, 149, 70])
    assert set(batch) == {"images", "labels", "path"}
    assert (batch["path"].dtype, batch["path"].shape) == (torch.float16, (3, STEPS, 3, 8, 8))
    seen: list[tuple[float, Tensor]] = []
    images = load_flow(teacher, RectifiedFlow).sample(
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
    assert paths.read_batch(range(COUNT))["path"][:, 0].float().std() == pytest.approx(1, abs=0.02)


def test_paths_begin_at_other_noise_than_samples(paths: StoreDataset) -> None:
    """Else samples and evaluations of a map with the seed of its paths would show rows that it was trained on."""
    numbers = list(range(64))
    with randomness.deterministic(randomness.Samples(0, numbers)):
        noise = randomness.randn("sample noise", (64, 3, 8, 8), torch.device("cpu"))
    trained = paths.read_batch(numbers)["path"][:, 0].float()
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), trained.flatten())))[0, 1]) < 0.05


def test_a_teacher_is_guided_by_its_early_checkpoint(tmp_path: Path) -> None:
    """The paths are those of autoguidance, and paths of another scale are refused."""
    run = {"train_num_steps": 8, "save_every": 1, "ema_decay": 0, "lr_warmup_steps": 0, "learning_rate": 1e-2}
    teacher = train_teacher(tmp_path / "teacher", **run)
    PartialState()
    config, _ = resolved(taught(teacher, tmp_path / "run", guidance_scale=1, autoguidance=1.5, teacher_samples=64))
    request = DistillationData.of(config)
    assert request is not None
    assert request.calls == 2 * STEPS
    drawn = open_drawn(request, open_pictures(config.data), config)[0]
    batch = drawn.read_batch(range(4))
    early = load_flow(teacher / "checkpoints/step_00000001", RectifiedFlow)
    flow, noise = load_flow(teacher, RectifiedFlow), batch["path"][:, 0].float()
    for scale, near in ((1.5, True), (1.0, False)):
        images = flow.sample(
            noise=noise, steps=STEPS, guidance=Guidance(autoguidance=scale, earlier=early.exact_velocity)
        )
        assert bool((images.mul(255) - batch["images"]).abs().max() < 1) == near
    assert_refused(
        "train_mean_flow.py",
        1,
        f"--teacher {teacher} --autoguidance 2 --teacher_samples 64 --teacher_steps 3 --output_dir {tmp_path}/run",
        "differ in autoguidance (1.5 stored, 2",
    )


def learn(teacher: Path, output_dir: Path, teacher_dir: Path | None, steps: int) -> None:
    flags = {"teacher_dir": teacher_dir, "batch_size": 16 // PartialState().num_processes, "lr_warmup_steps": 0}
    train(taught(teacher, output_dir, train_num_steps=steps, learning_rate=1e-4, **flags))


def test_training_starts_from_the_teacher(teacher: Path, paths: StoreDataset, tmp_path: Path) -> None:
    run_on_ranks(1, learn, teacher, tmp_path / "1", paths.path, 6)
    assert list(losses(tmp_path / "1")) == [3, 6]
    description = json.loads((tmp_path / "1/checkpoints/step_00000006/flow.json").read_text())
    assert (description["kind"], description["whole_fraction"]) == ("DistilledFlow", 0.5)
    before, after = load_flow(teacher, RectifiedFlow), load_flow(tmp_path / "1", DistilledFlow)
    earlier, later = before.state_dict(), after.state_dict()
    assert earlier.keys() - later.keys() == {"network.augmentation_embedding.weight"}, "paths are not augmented"
    for name, weights in later.items():
        assert (earlier[name] - weights).abs().max() < 6.1e-4, "not the weights of the teacher, six steps later"
    assert after.sample(2, labels=torch.tensor([0, 1])).shape == (2, 3, 8, 8)


def test_a_teacher_must_predict_the_velocity(tmp_path: Path) -> None:
    clean = train_teacher(tmp_path / "clean", prediction="clean")
    flags = f"--teacher {clean} --output_dir {tmp_path / 'run'}"
    assert_refused("train_mean_flow.py", 1, flags, "predicts the clean: pass one that predicts the velocity")


class KilledError(Exception):
    """In place of a kill."""


def begin_to_draw(teacher: Path, output_dir: Path) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "write", killed)
        with pytest.raises(KilledError):
            draw_paths(teacher, output_dir)


def test_a_teacher_that_changed_or_went_while_it_drew(teacher: Path, tmp_path: Path) -> None:
    """The paths would be of two teachers, or there is none to go on with: both name another folder as the remedy."""
    PartialState()
    mine = tmp_path / "teacher"
    shutil.copytree(teacher, mine)
    begin_to_draw(mine, tmp_path / "run")
    shutil.rmtree(mine)
    train_teacher(mine, use_cfg=True, augment=0.15, seed=1)
    flags = f"--teacher {mine} --teacher_samples {COUNT} --teacher_steps {STEPS} --guidance_scale {SCALE}"
    said = f"the paths in {tmp_path}/run/paths differ in teacher ("
    assert_refused("train_mean_flow.py", 1, f"{flags} --output_dir {tmp_path}/run", said)
    shutil.rmtree(mine)
    train_teacher(mine, use_cfg=True, augment=0.15, seed=1, train_num_steps=6)
    assert_refused(
        "train_mean_flow.py", 1, f"{flags} --output_dir {tmp_path}/run", "no longer exists: choose another --output_dir"
    )


def test_paths_that_exist_keep_their_precision(teacher: Path, tmp_path: Path) -> None:
    """A run on the paths of another one measures the speeds again, and bf16 may be faster then."""
    PartialState()
    run_on_ranks(1, learn, teacher, tmp_path / "run", None, 3)
    words = f"--teacher {teacher} --teacher_dir {tmp_path}/run/paths --output_dir {tmp_path}/other --budget 10m"
    config = parse(OneStepConfig, "", words.split())
    run = planned(config, 1000, lambda config: 20.0 if config.run.mixed_precision == "bf16" else 10.0).run
    assert run.mixed_precision == "no"
