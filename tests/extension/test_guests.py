"""Parts of one's own, a file each: the programs train, resume, sample and evaluate them, chosen by their names."""

import importlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rectified_flow import UsageError
from rectified_flow.load import build_flow, load_flow
from tests.programs import program
from tests.ranks import run_on_ranks

SMALL = "--dataset squares --image_size 8 --dim 8 --dim_mults 1"
NO_UNET = "--dataset squares --image_size 8"
ROWS = {
    "own_network": ("network", f"{NO_UNET} --use_cfg --network TwoConvolutions --network_options width=8"),
    "own_adapter": ("network", f"{NO_UNET} --network Adapted --network_options width=8"),
    "own_flow": ("flow", f"{SMALL} --flow CircleFlow"),
    "own_objective": ("objective", f"{SMALL} --flow AbsoluteFlow"),
    "own_space": (
        "space",
        "--dataset rings --space Clouds --space_options scale=300 --network PointNetwork --network_options width=16",
    ),
    "own_dataset": ("dataset, condition", "--dataset ramps --image_size 8 --dim 8 --dim_mults 1 --use_cfg"),
    "own_pictures": ("source of images", "--dataset squares --image_size 8 --dim 8 --dim_mults 1 --use_cfg"),
    "own_condition": (
        "kind of column",
        "--dataset dials --image_size 8 --dim 8 --dim_mults 1 --condition_on turn --condition_types turn=angle",
    ),
    "own_autoencoder": (
        "autoencoder",
        f"{NO_UNET} --dim 8 --dim_mults 1 --autoencoder Folded --autoencoder_options unit=0.5",
    ),
    "own_optimizer": ("optimizer", f"{SMALL} --optimizer sign_descent --optimizer_options momentum=0.8"),
    "own_times": ("time distribution", f"{SMALL} --time_distribution PowerOfUniform --time_options power=2"),
    "own_metric": ("metric", SMALL),
    "own_degradation": ("degradation", f"{SMALL} --degrade Posterised:3"),
}
"""The part that each guest replaces, and the flags that choose it."""
METRICS = {"own_metric": "frechet mean_gap brightness"}
EVALUATED = ("own_flow", "own_space", "own_dataset", "own_autoencoder", "own_metric")
"""Guests whose code an evaluation calls; evaluations of the other guests are slow tests."""
REFUSES = ("own_network", "own_flow", "own_space")
"""One guest that supports all ways of sampling, and all that do not; for the other guests, the test is slow."""
SCHEDULE = (
    "--global_batch_size 8 --learning_rate 1e-2 --lr_warmup_steps 2 --ema_decay 0.9 --save_every 4 --log_every 1"
    " --train_num_steps 8 --num_samples 3 --sample_steps 2"
)
ROOT = Path(__file__).resolve().parents[2]


def train(guest: str, output_dir: Path) -> None:
    """Train a guest on this rank by the program; it must not end well on several ranks, so the trainer is called."""
    from rectified_flow.cli.config import TrainConfig
    from rectified_flow.cli.train import train
    from rectified_flow.flags import parse

    for module in modules(guest):
        importlib.import_module(module)
    assert train(parse(TrainConfig, "", training_flags(guest, output_dir)))


@pytest.fixture(scope="module", params=ROWS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A guest's name and its folder of runs: straight to step 8 on two ranks, and resumed from its step 4."""
    folder = tmp_path_factory.mktemp(request.param)
    run_on_ranks(2, train, request.param, folder / "straight")
    shutil.copytree(folder / "straight", folder / "resumed")
    shutil.rmtree(newest(folder / "resumed"))
    run_on_ranks(2, train, request.param, folder / "resumed")
    return request.param, folder


def training_flags(guest: str, output_dir: Path) -> list[str]:
    return f"{ROWS[guest][1]} {SCHEDULE} --output_dir {output_dir} --import {' '.join(modules(guest))}".split()


def modules(guest: str) -> list[str]:
    """Return the guest's module, and that of the twenty pictures that most guests are trained on."""
    return [f"tests.extension.{name}" for name in dict.fromkeys((guest, "own_pictures"))]


def newest(run: Path) -> Path:
    return run / "checkpoints/step_00000008"


def test_the_program_itself_trains_it(runs: tuple[str, Path], tmp_path: Path) -> None:
    guest, folder = runs
    [(code, errors)] = run_on_ranks(1, program, "train_oxford.py", training_flags(guest, tmp_path))
    assert code == 0, errors
    for one, two in zip(losses(tmp_path), losses(folder / "straight"), strict=True):
        assert one == pytest.approx(two, rel=1e-3), "the same run on one process and on two"


def losses(run: Path) -> list[float]:
    return [json.loads(row)["loss"] for row in (run / "metrics.jsonl").read_text().splitlines()]


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
    if guest not in ("own_degradation", "own_condition"):  # whose previews show the sources, and the angles, too
        assert grid.size == Image.open(tmp_path / "grid.png").size, "a preview shows what sample.py draws"


def slow_except(fast: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize a test over all guests, and mark the guests that are not in ``fast`` as slow."""
    guests = [pytest.param(guest, marks=() if guest in fast else pytest.mark.slow) for guest in ROWS]
    return pytest.mark.parametrize("runs", guests, indirect=True, scope="module")


@slow_except(EVALUATED)
def test_it_is_evaluated_by_the_program(runs: tuple[str, Path], tmp_path: Path) -> None:
    guest, folder = runs
    flags = ["--checkpoint", str(folder / "straight"), "--output_dir", str(tmp_path), "--num_samples", "4"]
    flags += ["--steps", "2", "--feature_network", "efficientnet_lite0", "--import", *modules(guest)]
    if guest in METRICS:
        flags += ["--metric", *METRICS[guest].split()]
    [(code, errors)] = run_on_ranks(1, program, "evaluate.py", flags)
    assert code == 0, errors
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    assert all(np.isfinite(list(result["distances"].values())))
    assert ({"mean_gap", "brightness"} <= result["distances"].keys()) == (guest in METRICS)
    assert ("copies" in result["distances"]) == (guest not in METRICS)


def test_the_table_of_the_documentation_has_these_rows() -> None:
    """Each row: the part, what is registered, and the flag that chooses it."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = re.search(r"## A new part: one file.*?(\n\|.*?)\n\n", page, re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].strip().splitlines()[2:]]
    guests = {(part, guest): flag for part, _, flag, files in rows for guest in re.findall(r"\[(\w+)\.py\]", files)}
    assert guests.keys() == {(part, guest) for guest, (part, _) in ROWS.items()}
    for (part, guest), flag in guests.items():
        words = ROWS[guest][1] if part != "metric" else f"--metric {METRICS[guest]}"
        name = flag.split("`")[1]
        assert f"{name} " in words, (part, flag)


@slow_except(REFUSES)
def test_ways_of_sampling_that_it_does_not_have_are_refused(runs: tuple[str, Path], tmp_path: Path) -> None:
    guest, folder = runs
    Image.new("RGB", (8, 8)).save(tmp_path / "start.png")
    flags = ["--checkpoint", str(folder / "straight"), "--num_samples", "2", "--import", f"tests.extension.{guest}"]
    for number, (more, refused) in enumerate(
        (
            (["--path", "strip"], guest == "own_flow"),
            (["--from_images", str(tmp_path / "start.png")], guest in ("own_flow", "own_space")),
        )
    ):
        there = ["--output_dir", str(tmp_path / f"out-{number}")]
        [(code, errors)] = run_on_ranks(1, program, "sample.py", [*flags, *there, *more])
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
    assert document["flow"]["network"]["kind"] == type(flow.network).__name__
    assert document["flow"]["space"]["kind"] == type(flow.space).__name__
    assert document["training"]["import"] == modules(guest)


def test_without_its_module_the_kind_is_named(runs: tuple[str, Path], tmp_path: Path) -> None:
    """Sample without --import. Optimizers and metrics are not named by a checkpoint, so sampling works without them."""
    guest, folder = runs
    flags = ["--checkpoint", str(folder / "straight"), "--output_dir", str(tmp_path)]
    [(code, errors)] = run_on_ranks(1, program, "sample.py", flags)
    if guest in ("own_pictures", "own_optimizer", "own_metric"):
        assert code == 0, errors
        return
    assert code == 2
    assert "--import MODULE" in errors
    assert errors.count("\n") == 1


def test_a_hostile_checkpoint_imports_and_calls_nothing(tmp_path: Path) -> None:
    for kind in ("os.system", "subprocess.Popen", "eval", "tests.extension.own_network:build"):
        description: dict[str, Any] = {"kind": "RectifiedFlow", "network": {"kind": kind, "command": "touch hacked"}}
        with pytest.raises(UsageError, match=f"the kind {kind} is not registered"):
            build_flow(description, "a test")
    assert not Path("hacked").exists()


def test_what_is_frozen_is_saved_once_or_not_at_all(runs: tuple[str, Path]) -> None:
    guest, folder = runs
    model, ema = (set(load_file(newest(folder / "straight") / f"{name}.safetensors")) for name in ("model", "ema"))
    frozen = {"time_embedding.frequencies"} & model
    assert ema == model - frozen
    assert len(ema) > 0
    assert not [name for name in model if name.startswith("base.")], guest
