"""Tests of losses and gradients that are not finite: such a step changes nothing on any rank."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import image_indices
from rectified_flow.errors import RunError
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.training import stepper
from rectified_flow.training.evaluations import Callback
from rectified_flow.training.trainer import Trainer, build_accelerator
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, build_trainer, metrics, tiny_config

KINDS = ("loss", "loss alone", "gradient alone")
STEPS = 12
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
"""An optimizer that is not fused: it takes no step, instead of a step without an effect."""


class Faulty(RectifiedFlow):
    """A flow with a bad loss or gradient at some steps on the last rank."""

    progress = 0.0

    def __init__(self, kind: str, bad: tuple[int, ...]) -> None:
        super().__init__(Unet(8, (1,), image_size=8, attention_sides=(), blocks_per_level=1))
        self.kind, self.bad = kind, bad

    def forward(self, **batch: Any) -> Tensor:
        loss = super().forward(**batch)
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if not last or round(self.progress * STEPS) + 1 not in self.bad or not self.training:
            return loss
        if self.kind == "loss":
            return loss * torch.nan
        if self.kind == "loss alone":  # its gradient is finite
            return loss + torch.inf
        parameter = next(p for p in self.parameters() if p.dim() > 1)
        return loss + (parameter.flatten()[0].abs() * 0).sqrt()  # 0 with the gradient of a square root at 0


def build(config: TrainingConfig, dataset: ImageDataset, kind: str, bad: tuple[int, ...], **parts: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(Faulty(kind, bad), dataset, config, **parts)


def weights(trainer: Trainer) -> Tensor:
    modules = [trainer.flow, trainer.averaged_flow]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()]).clone()


def checkpoints(output_dir: Path) -> list[str]:
    return [path.name for path in sorted((output_dir / "checkpoints").glob("step_*"))]


def train_with_bad_steps(
    config: TrainingConfig, dataset: ImageDataset, kind: str, bad: tuple[int, ...], optimizer: Any = None
) -> tuple[list[Tensor], dict[str, int]]:
    """The weights and their average after each step, and the counters at the end."""
    trainer = build(config, dataset, kind, bad, optimizer=optimizer)
    after = [weights(trainer)]
    take = trainer.stepper.take

    def take_and_look(batches: Iterator[dict[str, Tensor]]) -> None:
        take(batches)
        trainer.stepper.finish_pending()
        after.append(weights(trainer))

    trainer.stepper.take = take_and_look  # type: ignore[method-assign]
    trainer.train()
    state = trainer.state
    assert state.ema is not None
    return after, {"updates": state.updates, "bad": state.bad_steps, "ema": int(state.ema.step)}


@pytest.mark.parametrize(("kind", "optimizer"), [("loss", None), ("loss alone", None), ("gradient alone", SGD)])
def test_a_bad_step_changes_nothing_on_any_rank(
    tmp_path: Path, flowers: ImageDataset, kind: str, optimizer: Any
) -> None:
    config = tiny_config(tmp_path, train_num_steps=STEPS, num_samples=0, log_every=2, batch_size=4)
    results = run_on_ranks(2, train_with_bad_steps, config, flowers, kind, (4, 5, 9), optimizer)
    for after, counters in results:
        assert counters == {"updates": 9, "bad": 3, "ema": 9}
        for step in range(1, STEPS + 1):
            assert after[step].isfinite().all()
            assert torch.equal(after[step], after[step - 1]) == (step in (4, 5, 9)), step
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[1][0], strict=True))
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert [row["bad_steps"] for row in rows] == [0, 1, 2, 2, 3, 3]
    assert all(0.1 < row["loss"] < 3 and row["grad_norm"] > 0 for row in rows)
    assert [row["learning_rate"] for row in rows][:3] == pytest.approx([4e-4, 8e-4, 8e-4])
    bad = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in bad] == [4, 5, 9]
    positions = range(3 * 16, 4 * 16)
    if kind != "gradient alone":  # rank 1 of 2 has every second row
        positions = positions[1::2]
    assert bad[0]["images"] == sorted(image_indices(list(positions), len(flowers), config.seed).tolist())


def test_resuming_between_bad_steps_is_byte_equal(tmp_path: Path, flowers: ImageDataset) -> None:
    bad = (3, 6, 7, 8, 11)
    settings: dict[str, Any] = {"train_num_steps": STEPS, "num_samples": 0, "save_every": 7, "log_every": 1}
    straight, halves = tiny_config(tmp_path / "a", **settings), tiny_config(tmp_path / "b", **settings)
    run_on_ranks(1, train_with_bad_steps, straight, flowers, "loss", bad)
    run_on_ranks(1, train_with_bad_steps, halves, flowers, "loss", bad)
    for path in (tmp_path / "b/checkpoints/step_00000012").iterdir():
        path.unlink()
    run_on_ranks(1, train_with_bad_steps, halves, flowers, "loss", bad)
    assert_same_bytes(tmp_path / "a", tmp_path / "b", STEPS)
    assert (tmp_path / "a/bad_steps.jsonl").read_text() == (tmp_path / "b/bad_steps.jsonl").read_text()
    lines = [[row | {"images_per_second": 0} for row in metrics(tmp_path / run)] for run in "ab"]
    assert lines[0] == lines[1]


def train_until_too_bad(output_dir: Path, dataset: ImageDataset) -> tuple[str, int]:
    config = tiny_config(output_dir, train_num_steps=STEPS, num_samples=0, save_every=2)
    trainer = build(config, dataset, "loss", (2, 3, 5, 6, 7, 8))
    with patch.object(stepper, "MAX_SKIPPED", 3), pytest.raises(RunError) as problem:
        trainer.train()
    return str(problem.value), trainer.state.bad_steps


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path: Path, flowers: ImageDataset) -> None:
    for sentence, bad_steps in run_on_ranks(2, train_until_too_bad, tmp_path, flowers):
        assert sentence.startswith("3 steps in a row")
        assert "step 7" in sentence
        assert bad_steps == 5
    assert checkpoints(tmp_path) == ["step_00000002", "step_00000004", "step_00000006"]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def train_with_loss_scale(output_dir: Path, dataset: ImageDataset, bad: tuple[int, ...]) -> dict[str, float]:
    """The arithmetic of fp16 on a CPU: a gradient scaler that starts too high."""
    from rectified_flow.training import trainer as module

    def with_scaler(config: TrainingConfig) -> Any:
        accelerator = build_accelerator(config)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
        return accelerator

    setattr(module, "build_accelerator", with_scaler)  # noqa: B010 -- in this process only
    config = tiny_config(output_dir, train_num_steps=STEPS, num_samples=0, log_every=2)
    trainer = build(config, dataset, "loss", bad)
    trainer.train()
    state = trainer.state
    assert state.ema is not None
    assert weights(trainer).isfinite().all()
    return {
        "updates": state.updates, "skips": state.scaler_skips, "bad": state.bad_steps, "ema": int(state.ema.step),
    }  # fmt: skip


def test_a_loss_scale_that_is_too_large_is_no_bad_number(tmp_path: Path, flowers: ImageDataset) -> None:
    [counters] = run_on_ranks(1, train_with_loss_scale, tmp_path, flowers, (10,))
    assert counters["bad"] == 1
    assert 0 < counters["skips"] < 9
    assert counters["updates"] == counters["ema"] == STEPS - counters["skips"] - 1
    rows = metrics(tmp_path)
    assert (rows[-1]["scaler_skips"], rows[-1]["bad_steps"]) == (counters["skips"], 1)
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3 * min(1, counters["updates"] / 5))


@pytest.mark.parametrize("decay", [0.9, 0])
def test_weights_that_exploded_are_not_saved(tmp_path: Path, flowers: ImageDataset, decay: float) -> None:
    def schedule(updates: int, _total: int) -> float:
        return 1e33 if updates == 3 else 1.0

    config = tiny_config(
        tmp_path, train_num_steps=STEPS, num_samples=0, save_every=1, keep_checkpoints=2, max_grad_norm=0,
        log_every=100, ema_decay=decay,
    )  # fmt: skip
    with pytest.raises(RunError, match=r"exploded by step 4 .* not saved") as problem:
        build_trainer(config, flowers, lr_schedule=schedule).train()
    assert "`learning_rate`" in str(problem.value)
    assert checkpoints(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"], "an early one and the newest"


def test_an_average_that_is_not_finite_is_not_saved(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=STEPS, num_samples=0, save_every=2, log_every=100)
    trainer = build_trainer(config, flowers)
    take = trainer.stepper.take

    def take_and_spoil(batches: Iterator[dict[str, Tensor]]) -> None:
        take(batches)
        if trainer.state.step == 3:
            next(p for p in trainer.averaged_flow.parameters() if p.ndim > 1).data.flatten()[0] = torch.nan

    trainer.stepper.take = take_and_spoil  # type: ignore[method-assign]
    with pytest.raises(RunError, match="exploded by step 4"):
        trainer.train()
    assert checkpoints(tmp_path) == ["step_00000002"]


def test_nothing_is_pruned_during_bad_steps(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=STEPS, num_samples=0, save_every=1, keep_checkpoints=1)
    kept: dict[int, list[str]] = {}

    class Watch(Callback):
        def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
            trainer.run.saver.wait()
            kept[trainer.state.step] = checkpoints(tmp_path)

    trainer = build(config, flowers, "loss", (4, 5))
    trainer.callbacks.append(Watch())
    trainer.train()
    early = "step_00000001"
    assert kept[3] == [early, "step_00000003"]
    assert kept[5] == [early, "step_00000003", "step_00000004", "step_00000005"]
    assert kept[6] == [early, "step_00000006"]
