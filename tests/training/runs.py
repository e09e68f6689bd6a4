"""Tiny training runs for the tests, started in this process or on ranks."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed

from rectified_flow.cli.train import build_evaluator
from rectified_flow.data.image_store import ImageDataset
from rectified_flow.data.store_builder import open_store
from rectified_flow.data.synthetic_flowers import SyntheticFlowers
from rectified_flow.flows import MeanFlow, RectifiedFlow
from rectified_flow.flows.flow import Flow
from rectified_flow.networks import Unet
from rectified_flow.training import MeanFlowConfig, Trainer, TrainingConfig

IMAGE_SIZE = 8


def tiny_dataset(cache_dir: Path, count: int = 46) -> ImageDataset:
    """Flowers of 8 px; 46 is a multiple of no batch size here."""
    return ImageDataset(open_store(SyntheticFlowers(16, count=count), IMAGE_SIZE, cache_dir=cache_dir))


def tiny_config(output_dir: Path, kind: type[TrainingConfig] = TrainingConfig, **flags: Any) -> TrainingConfig:
    """A config of 40 quick steps; ``kind`` decides which flow :func:`train` trains."""
    defaults = kind(
        image_size=IMAGE_SIZE,
        dim=8,
        dim_mults=(1, 2),
        global_batch_size=16,
        train_num_steps=40,
        learning_rate=1e-3,
        lr_warmup_steps=5,
        save_every=20,
        sample_every=20,
        num_samples=5,
        sample_steps=2,
        log_every=4,
        use_cfg=True,
        power_ema=True,
        feature_network="efficientnet_lite0",
        evaluation_samples=20,
        output_dir=output_dir,
    )
    return replace(defaults, **flags)


def build_trainer(config: TrainingConfig, dataset: ImageDataset) -> Trainer:
    set_seed(config.seed)
    network = Unet(
        config.dim,
        config.dim_mults,
        num_classes=dataset.num_classes if config.use_cfg else None,
        image_size=config.image_size,
        attention_sides=(4,),
        dropout=config.dropout,
    )
    settings: dict[str, Any] = {"label_dropout": 0.1, "horizontal_flip": True, "coupling": config.coupling}
    flow: Flow = RectifiedFlow(network, **settings)
    if isinstance(config, MeanFlowConfig):
        flow = MeanFlow(network, objective=config.objective, **settings)
    return Trainer(flow, dataset, config, build_evaluator(config, dataset))


def train(config: TrainingConfig, dataset: ImageDataset) -> dict[str, Any]:
    """Train and return what the caller compares; called on every rank."""
    trainer = build_trainer(config, dataset)
    trainer.train()
    return {"world_size": trainer.accelerator.num_processes, "step": trainer.state.step}


def metrics(output_dir: Path) -> list[dict[str, float]]:
    rows = []
    for line in (output_dir / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):  # a full disk may cut a line
            rows.append(json.loads(line))
    return rows


def losses(output_dir: Path) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in metrics(output_dir)}
