"""Tests of ``--evaluate_every`` and of memorisation: results, the best checkpoint, and the end of the run."""

import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import gather_object
from torch import Tensor

from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation import evaluator
from rectified_flow.evaluation.evaluator import METRICS, Comparison
from rectified_flow.evaluation.features import average_colours
from rectified_flow.evaluation.heldout import HeldOutPictures
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.registry import register
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import variant_conditions
from rectified_flow.system.artifact import find_damage
from rectified_flow.training.evaluations import HeldOutHook
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import IMAGE_SIZE, Tiny, tiny_config, tiny_dataset
from tests.training.runs import train as train_tiny

EVALUATED = Tiny(evaluate_every=3, metrics=(*METRICS, "votes"))
FLAGS: dict[str, Any] = {"num_samples": 0, "save_every": 0, "keep_checkpoints": 1, "log_every": 3}
HEADLINE = "colours_8x8_frechet_distance"


@register(role="score")
def votes(comparison: Comparison) -> dict[str, float]:
    """A score of one's own, of all processes together; the samples are not generated again."""
    everybody = gather_object([len(comparison.generated)])
    return {"votes": sum(everybody)}


def train_and_evaluate(config: TrainingConfig, dataset: ImageDataset) -> None:
    """Evaluate by colours alone, which is quick."""
    evaluator.load_features = lambda _name, _device: average_colours()  # type: ignore[attr-defined,assignment]
    train_tiny(config, dataset, EVALUATED)


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, flowers: ImageDataset) -> Path:
    """A run of 12 steps on two processes."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_on_ranks(2, train_and_evaluate, tiny_config(folder, train_num_steps=12, **FLAGS), flowers)
    return folder


def test_every_evaluation_is_written_down(run: Path) -> None:
    rows = evaluations(run)
    assert [row["step"] for row in rows] == [3, 6, 9, 12]
    for row in rows:
        assert row[HEADLINE] > 0
        assert (row["num_samples"], row["num_real"], row["split"], row["seed"]) == (20, 46, "train", 0)
        assert row["votes"] == 2 * 20, "each process has all samples"
    assert len({row[HEADLINE] for row in rows}) == 4
    assert (run / "evaluations.png").exists()


def test_the_best_checkpoint_is_kept(run: Path) -> None:
    rows = evaluations(run)
    best = min(rows, key=lambda row: row[HEADLINE])["step"]
    kept = checkpoint.best_of(run / "checkpoints")
    assert kept is not None
    assert checkpoint.step_of(kept) == best
    early = 3
    assert {checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run / "checkpoints")} == {early, best, 12}
    assert find_damage(kept) is None


EVERY = 4
"""Steps between measurements."""
CONTINUED_STEPS = 28
"""Steps of a run that continues after step 20, where memorisation is detected."""


class Memorised(HeldOutPictures):
    """Held-out pictures whose loss falls until the loss on training pictures is 1.1, and then rises."""

    def losses(self, flow: Flow, numbers: Sequence[int]) -> Tensor:
        held_out = torch.tensor([number < self.count for number in numbers])
        losses = super().losses(flow, [number % self.count + self.count for number in numbers])
        return torch.where(held_out, (losses - 1.1).abs(), losses)


def train(folder: str, cache: str, kind: type[Any] = RectifiedFlow, *, stops: bool = False, **flags: Any) -> str:
    """Train with all that serves few pictures; returns what was printed."""
    torch.manual_seed(0)
    pictures = tiny_dataset(Path(cache))
    space = Pixels((3, IMAGE_SIZE, IMAGE_SIZE), horizontal_flip=True, augmentation=0.1)
    size: dict[str, Any] = {"image_size": IMAGE_SIZE, "attention_sides": (), "blocks_per_level": 1}
    network = Unet(8, (1, 2), conditions=variant_conditions(space), dropout=0.1, **size)
    config = tiny_config(Path(folder), learning_rate=4e-3, ema_decay=0.5, num_samples=0, save_every=EVERY)
    training = pictures.subset(range(30))
    hook = HeldOutHook(Memorised(training, pictures.subset(range(30, 46)), seed=0), every=EVERY, stops=stops)
    with redirect_stdout(StringIO()) as printed:
        assert Trainer(kind(network, space=space), training, replace(config, **flags), callbacks=[hook]).train()
    return printed.getvalue()


def rows(folder: Path, name: str = "heldout") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    path = folder / "checkpoints" / checkpoint.step_name(step)
    files = [each.name for each in path.glob("*.safetensors")]
    return {f"{name} {key}": value for name in files for key, value in checkpoint.load_tensors(path, name).items()}


def test_losses_on_other_pictures_are_not_compared(tmp_path: Path) -> None:
    """Another seed measures other pictures with other noise."""
    pictures, losses = tiny_dataset(tmp_path / "cache"), [0.5, 0.4]
    row = {"heldout_loss": 0.45, "seen_loss": 0.4, "gap": 0.05, "losses": losses}
    for seed, known in ((0, [4]), (1, [8])):
        hook = HeldOutHook(HeldOutPictures(pictures.subset(range(2)), pictures.subset(range(2, 4)), seed), every=4)
        rows = [row | {"step": 4 * (1 + each), "seed": each} for each in (0, 1)]
        hook.file = SimpleNamespace(rows=lambda rows=rows: rows, path=tmp_path / "heldout.jsonl")  # type: ignore[assignment]
        assert [each.step for each in hook._measured()] == known


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process that ends where it memorises."""
    folder = tmp_path_factory.mktemp("alone")
    run_on_ranks(1, train_stopping, str(folder / "run"), str(folder / "cache"))
    return folder


def train_stopping(folder: str, cache: str, steps: int = 60) -> str:
    return train(folder, cache, stops=True, train_num_steps=steps)


def test_the_run_ends_and_keeps_the_best(alone: Path) -> None:
    measured = rows(alone / "run")
    steps, losses = [row["step"] for row in measured], [row["heldout_loss"] for row in measured]
    best = steps[losses.index(min(losses))]
    assert steps == list(range(EVERY, steps[-1] + 1, EVERY))
    assert best == steps[-4], "three measurements later"
    assert EVERY < best < steps[-1] < 60
    kept = checkpoint.best_of(alone / "run/checkpoints")
    assert kept is not None
    assert checkpoint.step_of(kept) == best
    status = json.loads((alone / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", steps[-1])
    last = rows(alone / "run", "metrics")[-1]
    assert (last["step"], last["heldout_loss"], last["gap"]) == (steps[-1], losses[-1], measured[-1]["gap"])


def test_a_run_that_is_resumed_has_the_same_weights_and_ends_at_the_same_step(alone: Path, tmp_path: Path) -> None:
    run_on_ranks(1, train_stopping, str(tmp_path), str(alone / "cache"), EVERY)
    run_on_ranks(1, train_stopping, str(tmp_path), str(alone / "cache"))
    assert rows(tmp_path) == rows(alone / "run")
    last = rows(tmp_path)[-1]["step"]
    mine, theirs = tensors(tmp_path, last), tensors(alone / "run", last)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_that_ended_ends_again(alone: Path) -> None:
    before = rows(alone / "run")
    [printed] = run_on_ranks(1, train_stopping, str(alone / "run"), str(alone / "cache"))
    assert rows(alone / "run") == before
    assert f"stopped at step {before[-1]['step']}: the network memorises its training pictures" in printed


@pytest.fixture(scope="module")
def gone_on(alone: Path) -> tuple[Path, str]:
    """A run that began without the flag and kept every checkpoint, and what it printed."""
    [printed] = run_on_ranks(1, train_on, str(alone / "on"), str(alone / "cache"), CONTINUED_STEPS, False)
    return alone / "on", printed


def test_without_the_flag_it_warns_once(gone_on: tuple[Path, str]) -> None:
    run, printed = gone_on
    assert rows(run)[-1]["step"] == CONTINUED_STEPS
    assert printed.count("warning: the network memorises its training pictures") == 1
    assert "`stop_when_memorising`" in printed
    assert checkpoint.best_of(run / "checkpoints") is None


@pytest.mark.parametrize(("is_kept", "said"), [(False, "was not kept"), (True, "best is the checkpoint of step")])
def test_a_run_that_went_on_stops_and_says_whether_its_best_is_there(
    alone: Path, gone_on: tuple[Path, str], tmp_path: Path, is_kept: bool, said: str
) -> None:
    """A run that began without the flag has no best checkpoint yet, and its older checkpoints may be missing."""
    shutil.copytree(gone_on[0], tmp_path / "run")
    best = min(rows(tmp_path / "run"), key=lambda row: row["heldout_loss"])["step"]
    if not is_kept:
        shutil.rmtree(tmp_path / "run/checkpoints" / checkpoint.step_name(best))
    [printed] = run_on_ranks(2, train_on, str(tmp_path / "run"), str(alone / "cache"), 60, True)[:1]
    [sentence] = [line for line in printed.splitlines() if line.startswith(f"stopped at step {CONTINUED_STEPS}")]
    assert said in sentence
    assert f"step {best}" in sentence
    kept = checkpoint.best_of(tmp_path / "run/checkpoints")
    assert (kept and checkpoint.step_of(kept)) == (best if is_kept else None)


def train_on(folder: str, cache: str, steps: int, stops: bool) -> str:
    return train(folder, cache, stops=stops, train_num_steps=steps, keep_checkpoints=0)
