"""Tests of the trainer on several ranks: weights, precisions, previews and resumed runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import sample_batches
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs.checkpoint import list_checkpoints
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.pictures import to_grid
from rectified_flow.training import trainer as module
from rectified_flow.training.evaluations import draw_preview
from rectified_flow.training.trainer import Trainer, choose_precision
from tests.ranks import run_on_ranks
from tests.training.runs import Tiny, build_trainer, losses, metrics, tiny_config, train


def make_a_rank_differ(output_dir: Path, dataset: ImageDataset) -> str:
    trainer = Trainer(RectifiedFlow(Unet(8, (1, 2), image_size=8)), dataset, tiny_config(output_dir, train_num_steps=3))
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            next(iter(trainer.flow.parameters())).add_(1e-3)
    with pytest.raises(RuntimeError) as problem:
        trainer.train()
    return str(problem.value)


def test_a_rank_with_other_weights_is_named(tmp_path: Path, flowers: ImageDataset) -> None:
    messages = run_on_ranks(2, make_a_rank_differ, tmp_path, flowers)
    assert len(messages) == 2
    assert all(message.startswith("the weights on rank 1 differ from those on other ranks") for message in messages)


def test_saved_weights_load_without_this_project(tmp_path: Path, flowers: ImageDataset) -> None:
    """The average's file lies over the model's, as it leaves out what is frozen."""
    run_on_ranks(1, train, tiny_config(tmp_path, train_num_steps=2), flowers, Tiny(use_cfg=False))
    network = Unet(8, (1, 2), image_size=8, attention_sides=(4,), blocks_per_level=1)
    model, ema = (
        load_file(tmp_path / "checkpoints/step_00000002" / name) for name in ("model.safetensors", "ema.safetensors")
    )
    network.load_state_dict(model)
    network.load_state_dict(model | ema)
    assert model.keys() - ema.keys() == {"time_embedding.frequencies"}


def test_precision_left_unset_is_the_launchers_then_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    unset, given = TrainingConfig(), TrainingConfig(mixed_precision="fp16")
    monkeypatch.setattr(module, "is_initialized", lambda: False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for made_for_it, expected in ((True, "bf16"), (False, "no")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, made=made_for_it: made)
        assert choose_precision(unset, gpu) == expected
        assert choose_precision(unset, cpu) == "no"
    for launchers in ("no", "bf16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launchers)
        assert choose_precision(unset, gpu) == choose_precision(unset, cpu) == launchers
        assert choose_precision(given, gpu) == "fp16"


def train_with_an_accelerator_of_your_own(output_dir: Path, dataset: ImageDataset) -> str:
    Accelerator(mixed_precision="bf16")
    return str(build_trainer(tiny_config(output_dir), dataset).accelerator.mixed_precision)


def test_precision_left_unset_is_that_of_an_accelerator_made_before(tmp_path: Path, flowers: ImageDataset) -> None:
    assert run_on_ranks(1, train_with_an_accelerator_of_your_own, tmp_path, flowers) == ["bf16"]


def test_bf16_trains_on_a_cpu(tmp_path: Path, flowers: ImageDataset) -> None:
    for precision in ("no", "bf16"):
        config = tiny_config(tmp_path / precision, train_num_steps=8, mixed_precision=precision)
        run_on_ranks(1, train, config, flowers)
    expected, got = losses(tmp_path / "no"), losses(tmp_path / "bf16")
    assert got != expected, "bf16 was not used"
    assert got == pytest.approx(expected, rel=0.03)
    saved = load_file(tmp_path / "bf16/checkpoints/step_00000008/ema.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}


def sample_counts(output_dir: Path, dataset: ImageDataset) -> list[tuple[int, int]]:
    """How many images this rank drew each time, and of how many different noises."""
    drawn = []

    class Counting(RectifiedFlow):
        def sample(self, *args: Any, **settings: Any) -> Tensor:
            images = super().sample(*args, **settings)
            drawn.append((len(images), len(images.flatten(1).unique(dim=0))))
            return images

    flow = Counting(Unet(8, (1, 2), image_size=8))
    Trainer(flow, dataset, tiny_config(output_dir, train_num_steps=2, sample_every=1)).train()
    return drawn


def test_every_rank_draws_its_share_of_the_samples(tmp_path: Path, flowers: ImageDataset) -> None:
    assert run_on_ranks(2, sample_counts, tmp_path, flowers) == [[(3, 3), (3, 3)]] * 2


def test_samples_are_the_same_on_any_number_of_ranks_and_later(tmp_path: Path, flowers: ImageDataset) -> None:
    """Five samples on two ranks: one of them is drawn twice and dropped. One step, so that weights hardly differ."""
    grids = []
    for number, (world_size, batch_size) in enumerate(((1, 16), (2, 8), (1, 2))):
        output_dir, accumulated = tmp_path / str(number), {"batch_size": batch_size, "train_num_steps": 1}
        run_on_ranks(world_size, train, tiny_config(output_dir, **accumulated), flowers)
        grids.append(torch.tensor(list(Image.open(output_dir / "samples/step_00000001.png").tobytes())))
    assert (grids[0] - grids[1]).abs().max() <= 1
    assert (grids[0] - grids[2]).abs().max() <= 1, "drawn in three parts, as it was trained on so few at once"
    assert grids[0].float().std() > 30
    flow = load_flow(tmp_path / "0/checkpoints/step_00000001")
    (later,) = (images for _, images in sample_batches(flow, range(5), seed=tiny_config(tmp_path).seed))
    assert (torch.from_numpy(to_grid(later)).flatten().long() - grids[0]).abs().max() <= 1, "what sample.py draws"


def test_a_preview_that_needs_too_much_memory_loses_no_step(tmp_path: Path, flowers: ImageDataset) -> None:
    trainer = build_trainer(tiny_config(tmp_path, train_num_steps=2), flowers)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise MemoryError

    trainer.averaged_flow.sample = fail  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        trainer.train()
    trainer.run.saver.wait()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step_00000002"]


def test_without_average_the_weights_are_sampled(tmp_path: Path, flowers: ImageDataset) -> None:
    run_on_ranks(1, train, tiny_config(tmp_path, train_num_steps=2, ema_decay=0), flowers)
    assert (tmp_path / "samples/step_00000002.png").exists()
    assert not (tmp_path / "checkpoints/step_00000002/ema.safetensors").exists()


def test_old_metrics_are_kept_when_a_run_starts_anew(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=4, num_samples=0)
    for number in range(2):
        run_on_ranks(1, train, config, flowers)
        (tmp_path / "checkpoints").rename(tmp_path / f"moved-{number}")
    assert len(metrics(tmp_path)) == 1
    assert (tmp_path / "metrics.old.jsonl").exists()


def test_epochs_are_counted_in_images_when_the_batch_changes(tmp_path: Path, flowers: ImageDataset) -> None:
    epochs: dict[str, Any] = {"train_num_steps": None, "num_epochs": 1, "num_samples": 0}
    first = tiny_config(tmp_path, **epochs, save_every=1)
    run_on_ranks(1, train, first, flowers)
    assert list((tmp_path / "checkpoints").iterdir())[-1].name <= "step_00000003"
    more = tiny_config(tmp_path, **{**epochs, "num_epochs": 2}, global_batch_size=4, save_every=1)
    [result] = run_on_ranks(1, train, more, flowers)
    assert result["step"] == 3 + (2 * 46 - 3 * 16) // 4
    run_on_ranks(1, train, tiny_config(tmp_path, train_num_steps=2), flowers)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished", "and beyond"


def test_another_trainer_of_the_process_does_not_change_the_gradients(tmp_path: Path, flowers: ImageDataset) -> None:
    """Accelerate shares the number of micro-batches among all Accelerators."""

    def trainer(accumulation: int) -> Trainer:
        config = tiny_config(tmp_path / str(accumulation), batch_size=4, gradient_accumulation_steps=accumulation)
        return build_trainer(replace(config, global_batch_size=None), flowers)

    def gradient(of: Trainer) -> Tensor:
        of.state.optimizer.zero_grad()
        of.stepper.forward_backward(flowers.read_batch(range(4)), 3)
        return torch.cat([each.grad.flatten() for each in of.flow.parameters() if each.grad is not None]).clone()

    first = trainer(4)
    before = gradient(first)
    trainer(1)
    torch.testing.assert_close(gradient(first), before)


def test_a_dataset_without_items_is_refused(tmp_path: Path, flowers: ImageDataset) -> None:
    with pytest.raises(UsageError, match="the dataset has no items"):
        build_trainer(tiny_config(tmp_path), flowers.subset([]))


def test_a_preview_of_a_dataset_with_columns_of_another_kind(tmp_path: Path, flowers: ImageDataset) -> None:
    class Table(list[Any]):
        columns = ("a", "b")

    trainer = build_trainer(tiny_config(tmp_path), flowers)
    drawn = draw_preview(trainer.flow, Table([flowers[0]]), trainer.config, trainer.accelerator, 4)
    assert drawn is not None
    assert len(drawn[0]) == 5
