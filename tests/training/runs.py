"""Tiny training runs for the tests, started in this process or on ranks."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import set_seed

from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.evaluation.evaluator import METRICS, Evaluator
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training.evaluations import EvaluationHook
from rectified_flow.training.trainer import Trainer

IMAGE_SIZE = 8
SAVED = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "trainer.json")
Kind = Literal["rectified", "mean"]


@dataclass(frozen=True)
class Tiny:
    """The flow of a tiny run, whose config has the other settings."""

    kind: Kind = "rectified"
    use_cfg: bool = True
    evaluate_every: int = 0
    metrics: tuple[str, ...] = METRICS

    def build(self, dataset: ImageDataset) -> RectifiedFlow | MeanFlow:
        """The flow, on a Unet of two levels."""
        network = Unet(
            8,
            (1, 2),
            conditions=dataset.conditions if self.use_cfg else None,
            image_size=IMAGE_SIZE,
            attention_sides=(4,),
            blocks_per_level=1,
            dropout=0.1,
        )
        kind = MeanFlow if self.kind == "mean" else RectifiedFlow
        return kind(network, condition_dropout=0.1, space=Pixels(horizontal_flip=True))


RECTIFIED = Tiny()


def tiny_dataset(cache_dir: Path, count: int = 46) -> ImageDataset:
    """Flowers of 8 px; 46 is a multiple of no batch size here."""
    return ImageDataset(open_store(SyntheticFlowers(16, count=count), IMAGE_SIZE, cache_dir=cache_dir))


def tiny_config(output_dir: Path, **flags: Any) -> TrainingConfig:
    """A config of 40 quick steps."""
    defaults = TrainingConfig(
        global_batch_size=16,
        train_num_steps=40,
        learning_rate=1e-3,
        lr_warmup_steps=5,
        save_every=20,
        sample_every=20,
        num_samples=5,
        sample_steps=2,
        log_every=4,
        output_dir=output_dir,
    )
    return replace(defaults, **flags)


def build_trainer(config: TrainingConfig, dataset: ImageDataset, tiny: Tiny = RECTIFIED, **parts: Any) -> Trainer:
    """A trainer; ``parts`` are further arguments of its constructor."""
    set_seed(config.seed)
    callbacks = parts.pop("callbacks", [])
    if tiny.evaluate_every:
        evaluator = Evaluator(dataset, "efficientnet_lite0", num_samples=20, seed=config.seed, metrics=tiny.metrics)
        callbacks = [EvaluationHook(evaluator, tiny.evaluate_every), *callbacks]
    return Trainer(tiny.build(dataset), dataset, config, callbacks=callbacks, **parts)


def train(config: TrainingConfig, dataset: ImageDataset, tiny: Tiny = RECTIFIED, **parts: Any) -> dict[str, Any]:
    """Train and return what the caller compares; called on every rank."""
    trainer = build_trainer(config, dataset, tiny, **parts)
    trainer.train()
    return {"world_size": trainer.accelerator.num_processes, "step": trainer.state.step}


def metrics(output_dir: Path) -> list[dict[str, float]]:
    rows = []
    for line in (output_dir / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):  # a full disk may cut a line
            rows.append(json.loads(line))
    return rows


def assert_same_bytes(one: Path, other: Path, step: int) -> None:
    """Check that the checkpoints of two runs at a step have the same weights, averages, moments and counters."""
    for name in SAVED:
        mine, theirs = (run / f"checkpoints/step_{step:08}" / name for run in (one, other))
        assert mine.read_bytes() == theirs.read_bytes(), name


def losses(output_dir: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in metrics(output_dir)}
