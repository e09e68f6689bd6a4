"""Measure the trade-off of guidance: distances, and how often a classifier predicts the requested class.

The classifier is a small network that is trained here, on training images minus a held-out set. Its accuracy on the
held-out set is printed, too, as an upper limit for the class agreement.
"""

import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.solvers import Guidance
from rectified_flow.load import load_flow
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import data_recipe, read_config
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import draw_lines, to_grid, write_picture

PIXELS = Pixels(horizontal_flip=True)


@dataclass(frozen=True)
class Flags:
    checkpoint: Path
    """A run or checkpoint with classes."""
    scales: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    """Guidance scales: 0 is unconditional, 1 is conditional without guidance."""
    num_samples: int = 500
    """Generated images per scale."""
    steps: int = 8
    """Sampling steps, of two network calls each. Guidance doubles the batch of each call."""
    feature_network: FeatureNetwork = "efficientnet_lite0"
    """Feature network of the distances."""
    seed: int = 0
    """Seed of the generated images and of the classifier."""
    epochs: int = 15
    """Training epochs of the classifier."""
    output_dir: Path = Path("runs/guidance")
    """Folder for the plots, the table's numbers and a sample grid per scale."""


def build_classifier(num_classes: int) -> nn.Sequential:
    """A classifier of four convolutions, each halving the side."""
    widths = [3, 32, 64, 128, 128]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def train_classifier(pictures: ImageDataset, flags: Flags) -> tuple[nn.Sequential, float]:
    """Train a classifier, and return it with its accuracy on a held-out eighth of the images."""
    torch.manual_seed(flags.seed)
    order = torch.randperm(len(pictures)).tolist()
    held_out, rest = order[: len(order) // 8], order[len(order) // 8 :]
    classifier = build_classifier(len(pictures.class_names))
    steps = flags.epochs * (len(rest) // 64)
    optimizer = torch.optim.AdamW(classifier.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = pictures.read_batch([rest[(64 * step + i) % len(rest)] for i in range(64)])
        loss = F.cross_entropy(classifier(PIXELS.encode(PIXELS.augment(batch["images"])[0])), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    classifier.eval()
    unseen = pictures.read_batch(held_out)
    return classifier, agreement(classifier, unseen["images"], unseen["labels"])


@torch.no_grad()
def agreement(classifier: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of uint8 ``images`` for which the classifier predicts ``labels``."""
    return (classifier(PIXELS.encode(images)).argmax(dim=1) == labels).float().mean().item()


def measure(flow: Flow, scale: float, evaluator: Evaluator, classifier: nn.Module, flags: Flags) -> dict[str, float]:
    """Distances at one scale, and the class agreement on as many images with evenly distributed classes."""
    how: dict[str, Any] = {"steps": flags.steps, "guidance": Guidance(scale)}
    generated = evaluator.generate(flow, **how)
    numbers = evaluator.distances(generated) | evaluator.scores(generated)
    classes = torch.arange(len(flow.class_names))
    wanted = range(flags.num_samples)
    drawn = sample_batches(flow, wanted, seed=flags.seed, conditions={"labels": classes}, **how)
    images = torch.cat([pictures for _, pictures in drawn])
    labels = torch.arange(len(images)) % len(classes)
    rows = min(8, len(images) // len(classes))
    write_picture(flags.output_dir / f"scale-{scale:g}.png", to_grid(images[: rows * len(classes)], len(classes)))
    return {"scale": scale, "agreement": agreement(classifier, images, labels), **numbers}


def main(flags: Flags) -> None:
    state = join_processes()
    source = checkpoint.resolve(flags.checkpoint)
    recipe = data_recipe(read_config(source / checkpoint.CONFIG_FILE), source)
    if recipe is None:
        sys.exit(f"--checkpoint {source} does not say how to open its training data")
    pictures = open_dataset(**{name: value for name, value in asdict(recipe).items() if value is not None})
    flow = load_flow(source)
    if not 0 < len(flow.class_names) <= flags.num_samples:
        sys.exit(f"--checkpoint {source} needs classes, and --num_samples at least one image per class")
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    classifier, accuracy = train_classifier(pictures, flags)
    print(f"accuracy of the classifier on {len(pictures) // 8} held-out images: {accuracy:.1%}\n")
    evaluator = Evaluator(pictures, flags.feature_network, state, num_samples=flags.num_samples, seed=flags.seed)
    seen, colours = evaluator.features
    names = [seen.frechet_name, seen.kernel_name, colours.kernel_name, "precision", "coverage"]
    print("| guidance scale | class agreement | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    results = []
    for scale in flags.scales:
        result = measure(flow, scale, evaluator, classifier, flags)
        results.append(result)
        numbers = " | ".join(f"{result[name]:.4g}" for name in names)
        print(f"| {scale:g} | {result['agreement']:.1%} | {numbers} |", flush=True)
    (flags.output_dir / "guidance.json").write_text(json.dumps({"accuracy": accuracy, "results": results}, indent=1))
    scales = [result["scale"] for result in results]
    for name, wanted in (("agreement", "agreement"), ("distance", names[0])):
        line = {wanted: (scales, [result[wanted] for result in results])}
        print(draw_lines(flags.output_dir / f"{name}.png", line, "guidance", "guidance scale", wanted))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
