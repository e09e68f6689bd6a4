"""Parts of one's own, each in a file of its own: everything the programs promise holds for them, too."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from PIL import Image
from safetensors.torch import load_file

from rectified_flow import Trainer, TrainingConfig, UsageError
from rectified_flow.load import build_flow, load_flow
from tests.programs import program
from tests.ranks import run_on_ranks

GUESTS = ("own_network", "own_flow", "own_objective", "own_space", "own_dataset", "own_adapter", "own_autoencoder")
pytestmark = pytest.mark.xdist_group("guests")


def train(guest: str, output_dir: Path, steps: int) -> list[str]:
    """Train a guest on this rank; returns the events of its run."""
    module = importlib.import_module(f"tests.extension.{guest}")
    set_seed(0)
    flow, dataset = module.build()
    config = TrainingConfig(
        global_batch_size=8, train_num_steps=steps, learning_rate=1e-2, lr_warmup_steps=2, ema_decay=0.9, save_every=4,
        log_every=1, num_samples=3, sample_steps=2, output_dir=output_dir,
    )  # fmt: skip
    Trainer(flow, dataset, config).train()
    return [name for name in sys.modules if name.startswith("tests.extension.own")]


@pytest.fixture(scope="module", params=GUESTS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A guest's name and its folder of runs: straight to step 8 on two ranks, and stopped at 4 and resumed."""
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, train, request.param, folder / "straight", 8)
    for steps in (4, 8):
        run_on_ranks(2, train, request.param, folder / "resumed", steps)
    return request.param, folder


def newest(run: Path) -> Path:
    return run / "checkpoints/step_00000008"


def test_it_trains_and_resumes_byte_equal(runs: tuple[str, Path]) -> None:
    _, folder = runs
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        straight, resumed = (newest(folder / run) / name for run in ("straight", "resumed"))
        assert straight.read_bytes() == resumed.read_bytes(), name
    start = load_file(folder / "resumed/checkpoints/step_00000004/model.safetensors")
    end = load_file(newest(folder / "resumed") / "model.safetensors")
    assert any(not torch.equal(start[name], end[name]) for name in end)


def test_it_is_sampled_by_the_program(runs: tuple[str, Path], tmp_path: Path) -> None:
    guest, folder = runs
    flags = ["--checkpoint", str(folder / "straight"), "--output_dir", str(tmp_path), "--num_samples", "3"]
    flags += ["--steps", "2", "--import", f"tests.extension.{guest}"]
    [(code, errors)] = run_on_ranks(1, program, "sample.py", flags)
    assert code == 0, errors
    pictures = [np.asarray(Image.open(tmp_path / f"0000{number}.png")) for number in range(3)]
    assert pictures[0].ndim == 3
    assert len({picture.tobytes() for picture in pictures}) == 3
    grid = Image.open(folder / "straight/samples/step_00000008.png")
    assert grid.size == Image.open(tmp_path / "grid.png").size, "a preview shows what sample.py draws"


def test_ways_of_sampling_that_it_does_not_have_are_refused(runs: tuple[str, Path], tmp_path: Path) -> None:
    guest, folder = runs
    Image.new("RGB", (8, 8)).save(tmp_path / "start.png")
    flags = ["--checkpoint", str(folder / "straight"), "--output_dir", str(tmp_path / "out"), "--num_samples", "2"]
    flags += ["--import", f"tests.extension.{guest}"]
    for more, refused in (
        (["--path", "strip"], guest == "own_flow"),
        (["--from_images", str(tmp_path / "start.png")], guest in ("own_flow", "own_space")),
    ):
        [(code, errors)] = run_on_ranks(1, program, "sample.py", [*flags, *more])
        assert code == (2 if refused else 0), errors
        assert "Traceback" not in errors


def test_it_comes_back_and_describes_itself(runs: tuple[str, Path]) -> None:
    guest, folder = runs
    importlib.import_module(f"tests.extension.{guest}")
    flow = load_flow(folder / "straight")
    samples = flow.sample(3, steps=2)
    shape = flow.space.picture_shape or flow.space.shape
    assert samples.shape == (3, *(shape or ()))
    assert samples.isfinite().all()
    document = json.loads((folder / "straight/config.json").read_text())
    assert document["network"]["kind"] == type(flow.network).__name__
    assert document["flow"]["space"]["kind"] == type(flow.space).__name__
    assert "dataset" not in document["data"], "no part of the run was opened from a hub id"


def test_without_its_module_the_kind_is_named(runs: tuple[str, Path], tmp_path: Path) -> None:
    """In a process that never imported the guest."""
    _, folder = runs
    flags = ["--checkpoint", str(folder / "straight"), "--output_dir", str(tmp_path)]
    [(code, errors)] = run_on_ranks(1, program, "sample.py", flags)
    assert code == 2
    assert "--import MODULE" in errors
    assert errors.count("\n") == 1


def test_a_hostile_checkpoint_imports_and_calls_nothing(tmp_path: Path) -> None:
    for kind in ("os.system", "subprocess.Popen", "eval", "tests.extension.own_network:build"):
        description: dict[str, Any] = {"kind": "RectifiedFlow", "network": {"kind": kind, "command": "touch hacked"}}
        with pytest.raises(UsageError, match=f"'{kind}' is not registered"):
            build_flow(description, "a test")
    assert not Path("hacked").exists()


def test_what_is_frozen_is_saved_once_or_not_at_all(runs: tuple[str, Path]) -> None:
    guest, folder = runs
    model, ema = (set(load_file(newest(folder / "straight") / f"{name}.safetensors")) for name in ("model", "ema"))
    frozen = {"time_embedding.frequencies"} & model
    assert ema == model - frozen
    assert len(ema) > 0
    assert not [name for name in model if name.startswith("base.")], guest
