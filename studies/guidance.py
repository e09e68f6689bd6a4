"""How does guidance trade the distance to the data against the requested class?

A flow with classes is trained, and drawn from at several guidance scales. ``agreement`` is the share of samples for
which a small classifier predicts the requested class. The classifier is trained on seven eighths of the pictures;
``--figures accuracy`` has its accuracy on the other eighth, the upper limit of the agreement.
"""

import sys
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rectified_flow import ImageDataset, Labels, Pixels, RectifiedFlow, Unet
from rectified_flow.flows.solvers import Guidance
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import load_trained, measure_samples, open_pictures, train_flow

SCALES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Guidance scales: 0 is unconditional, 1 is conditional without guidance."""
STEPS, EPOCHS, BATCH, WIDTHS = 4, 15, 64, (3, 32, 64, 128, 128)
PIXELS = Pixels(horizontal_flip=True)


def train(row: Row) -> None:
    """Train a flow with labels, which are dropped in a tenth of the rows."""
    pictures, size = open_pictures(row.data, row.image_size), row.image_size
    labels = {"labels": Labels(len(pictures.class_names))}
    network = Unet(28, (1, 2, 3), conditions=labels, image_size=size, dropout=0.0)
    flow = RectifiedFlow(network, space=Pixels((3, size, size), horizontal_flip=True), condition_dropout=0.1)
    train_flow(row, flow, pictures, minutes=row.budget, batch_size=32, lr_warmup_steps=50)


def train_classifier(pictures: ImageDataset, seed: int) -> tuple[nn.Module, float]:
    """Return a classifier of four convolutions, each halving the side, and its accuracy on held-out pictures."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    head = nn.Linear(WIDTHS[-1], len(pictures.class_names))
    classifier = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    order = torch.randperm(len(pictures)).tolist()
    held_out, rest = order[: len(order) // 8], order[len(order) // 8 :]
    steps = max(2, EPOCHS * len(rest) // BATCH)
    optimizer = torch.optim.AdamW(classifier.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = pictures.read_batch([rest[(BATCH * step + i) % len(rest)] for i in range(BATCH)])
        loss = F.cross_entropy(classifier(PIXELS.encode(PIXELS.augment(batch["images"])[0])), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    unseen = pictures.read_batch(held_out)
    return classifier.eval(), agreement(classifier, PIXELS.encode(unseen["images"]), unseen["labels"])


@torch.no_grad()
def agreement(classifier: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Return the share of images ``[b, 3, h, w]`` in [-1, 1] for which the classifier predicts ``labels`` ``[b]``."""
    return float((classifier(x).argmax(dim=1) == labels).float().mean())


def measure(row: Row) -> Figures:
    """Return the distances and the agreement at each scale."""
    flow, pictures = load_trained(row), open_pictures(row.data, row.image_size)
    classifier, accuracy = train_classifier(pictures, row.seed)
    ways = {f"scale {scale:g}": {"steps": STEPS, "guidance": Guidance(scale)} for scale in SCALES}
    figures = {way: dict(values) for way, values in measure_samples(row, flow, ways).items()}
    labels = torch.arange(row.num_samples) % len(pictures.class_names)
    for way, how in ways.items():
        torch.manual_seed(row.seed)
        parts = [flow.sample(labels=some, **how) for some in labels.split(BATCH)]
        figures[way] |= {"agreement": agreement(classifier, 2 * torch.cat(parts) - 1, labels), "accuracy": accuracy}
    return figures


STUDY = Study(
    __doc__ or "",
    {"classes": Case("1.0 and a little more is best by distance; agreement rises with the scale", train, measure)},
    Flags(num_samples=500, figures=("agreement", "frechet", "kernel", "colours_kernel", "precision")),
)

if __name__ == "__main__":
    sys.exit(run("studies.guidance"))
