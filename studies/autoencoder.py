"""How are the weights of ``--autoencoder small`` made, and how near are its reconstructions?

    python -m studies.autoencoder --packages FOLDER --emoji FOLDER --others FOLDER --minutes 60 --sharpen_minutes 6

The crops are built once. A killed training resumes from its newest checkpoint, with other ``--minutes`` if they are
given: the learning rate falls in the last quarter. Then a discriminator sharpens the decoder, while the encoder stays
as it is. The weights, their figures and a sheet of reconstructions are written last.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchmetrics.functional.image import structural_similarity_index_measure

from rectified_flow.evaluation.distances import frechet_distance, kernel_distance
from rectified_flow.evaluation.features import load_features
from rectified_flow.latents.autoencoders import SmallNetwork
from studies.autoencoder_data import build, crop_photograph

RATE, CRITIC_RATE, WARM_UP, DECAY_SHARE = 2e-3, 3e-4, 300, 0.25
CROP = 112
"""Side of the training pictures [px], random parts of the crops: a feature may be anywhere on the grid of 8 px."""
NOISE = 0.15
"""Largest standard deviation of the noise on latents, relative to theirs, for robustness to errors of a flow."""
SHARPENING_NOISE = 0.4
"""Like ``NOISE``, in the training with the discriminator. More noise improves samples, and not reconstructions."""
SCALED_SHARE = 0.3
"""Share of steps in which reduced latents must decode to reduced pictures, which makes latents smooth
(Kouzelis et al. 2025, arXiv:2502.09509)."""
ADVERSARIAL, FEATURES = 0.5, 0.7
"""Weights, relative to the pixel loss, of the adversarial loss and of the error in the discriminator's features
(Larsen et al. 2016, arXiv:1512.09300)."""
DRAWINGS, PHOTOGRAPHS = 0.2, 0.15
"""Factor of ``ADVERSARIAL`` and ``FEATURES`` for pictures that are not photographs, and the share of each batch that is
replaced by photographs. Both apply to the training with the discriminator."""
SAVE_EVERY = 120.0
"""Processor time between checkpoints [s]."""
Array = NDArray[np.uint8]


@dataclass(frozen=True)
class Flags:
    """Where the pictures are, and how long the training is."""

    packages: Path
    """Folder of the unpacked Debian packages."""
    emoji: Path
    """Folder with the Parquet files of the emoji."""
    others: Path
    """Folder of photographs that are not trained on, for the figures."""
    output_dir: Path = Path("runs/autoencoder")
    """Folder of the crops, checkpoints, weights and figures."""
    minutes: float = 60.0
    """Processor time of the training [min]."""
    sharpen_minutes: float = 6.0
    """Processor time of the decoder's training with a discriminator [min]; 0 leaves it out."""
    batch_size: int = 24
    """Pictures of a step."""


class Run:
    """A training that resumes from its checkpoint.

    Args:
        path: the checkpoint.
        parts: the networks and optimizers that it keeps.
    """

    def __init__(self, path: Path, **parts: Any) -> None:
        self.path, self.parts, self.step, self.seconds = path, parts, 0, 0.0
        if path.exists():
            saved = torch.load(path, weights_only=True)
            self.step, self.seconds = saved["step"], saved["seconds"]
            for name, part in parts.items():
                part.load_state_dict(saved[name])

    def save(self) -> None:
        """Write a checkpoint; a kill leaves the old or the new one."""
        new = self.path.with_suffix(".new")
        states = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({**states, "step": self.step, "seconds": self.seconds}, new)
        os.replace(new, self.path)

    def train(self, minutes: float, take_step: Callable[[Generator, int, float], Tensor]) -> None:
        """Take steps, given their number and the spent share of the time, until the processor time is spent."""
        rng = default_rng(self.step)
        torch.manual_seed(self.step)
        start, saved, losses = time.process_time() - self.seconds, self.seconds, list[float]()
        while self.seconds < 60 * minutes:
            losses.append(take_step(rng, self.step, self.seconds / (60 * minutes)).item())
            self.step += 1
            self.seconds = time.process_time() - start
            if len(losses) == 100:
                print(
                    f"{self.path.stem}: step {self.step}, {self.seconds:.0f} s, loss {np.mean(losses):.4f}", flush=True
                )
                losses.clear()
            if self.seconds - saved > SAVE_EVERY:
                self.save()
                saved = self.seconds
        self.save()


def train(crops: Array, flags: Flags) -> SmallNetwork:
    """Train encoder and decoder; return the average of their weights."""
    network, average = new_network(), new_network().requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.98), weight_decay=1e-3, fused=True)

    def take_step(rng: Generator, step: int, progress: float) -> Tensor:
        loss, _ = reconstruct(network, load_batch(crops, rng.integers(len(crops), size=flags.batch_size), rng), rng)
        update(network, optimizer, loss, RATE * scale_of_rate(step, progress))
        follow(average, network, step)
        return loss.detach()

    run = Run(flags.output_dir / "checkpoint.pt", network=network, average=average, optimizer=optimizer)
    run.train(flags.minutes, take_step)
    return average


def sharpen(trained: SmallNetwork, crops: Array, flags: Flags) -> SmallNetwork:
    """Train the decoder of the frozen encoder's latents against a discriminator; return the average of its weights."""
    network, average, critic = new_network(), new_network().requires_grad_(False), new_critic()
    network.load_state_dict(trained.state_dict())
    average.load_state_dict(trained.state_dict())
    network.encoder.requires_grad_(False)
    photographs = count_photographs(flags.output_dir)
    optimizer = torch.optim.AdamW(network.decoder.parameters(), betas=(0.5, 0.98), weight_decay=1e-3, fused=True)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), betas=(0.5, 0.98), fused=True)

    def take_step(rng: Generator, step: int, progress: float) -> Tensor:
        scale = scale_of_rate(step, progress)
        numbers = rng.integers(len(crops), size=flags.batch_size)
        more = rng.random(flags.batch_size) < PHOTOGRAPHS
        numbers = np.where(more, rng.integers(photographs, size=flags.batch_size), numbers)
        weights = torch.from_numpy(np.where(numbers < photographs, 1.0, DRAWINGS)).float()
        loss, (pictures, decoded) = reconstruct(network, load_batch(crops, numbers, rng), rng, SHARPENING_NOISE)
        with torch.autocast("cpu", torch.bfloat16):
            critic.requires_grad_(False)
            *features, verdict = activations(critic, decoded)
            with torch.no_grad():
                *wanted, _ = activations(critic, pictures)
            critic.requires_grad_(True)
            real, fake = critic(pictures).float(), critic(decoded.detach()).float()
        error = sum((a.float() - b.float()).abs().mean(dim=(1, 2, 3)) for a, b in zip(features, wanted, strict=True))
        extra = weights * (FEATURES * error - ADVERSARIAL * verdict.float().mean(dim=(1, 2, 3)))
        update(network, optimizer, loss + min(1.0, step / WARM_UP) * extra.mean(), CRITIC_RATE * scale)
        update(critic, critic_optimizer, F.relu(1 - real).mean() + F.relu(1 + fake).mean(), CRITIC_RATE * scale)
        follow(average, network, step)
        return loss.detach()

    optimizers = {"optimizer": optimizer, "critic_optimizer": critic_optimizer}
    run = Run(flags.output_dir / "sharpening.pt", network=network, average=average, critic=critic, **optimizers)
    run.train(flags.sharpen_minutes, take_step)
    return average


def new_network() -> SmallNetwork:
    """Return a network with the layout of memory that is fastest on a CPU."""
    return SmallNetwork().to(memory_format=torch.channels_last)


def activations(critic: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the outputs of the activation layers of a discriminator, followed by its final output."""
    outputs = list[Tensor]()
    for layer in critic:
        x = layer(x)
        outputs += [x] if isinstance(layer, nn.LeakyReLU) else []
    return [*outputs, x]


def new_critic() -> nn.Sequential:
    """Return a discriminator of overlapping patches of 38 px."""
    widths = ((3, 32, 2), (32, 64, 2), (64, 128, 2), (128, 128, 1))
    layers = [
        each for a, b, stride in widths for each in (spectral_norm(nn.Conv2d(a, b, 4, stride, 1)), nn.LeakyReLU(0.2))
    ]
    return nn.Sequential(*layers, spectral_norm(nn.Conv2d(128, 1, 1)))


def reconstruct(
    network: SmallNetwork, pictures: Tensor, rng: Generator, most: float = NOISE
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the loss, and the pictures with those decoded from noisy and, in some steps, reduced latents."""
    with torch.autocast("cpu", torch.bfloat16):
        latents = network.encode(pictures).float()
        penalty = latents.square().mean()
        if rng.random() < SCALED_SHARE:
            side = int(rng.integers(CROP // 16, CROP // 8))
            latents = F.interpolate(latents, (side, side), mode="bilinear", antialias=True)
            pictures = F.interpolate(pictures, (8 * side, 8 * side), mode="bilinear", antialias=True)
        spread = latents.detach().std(dim=(0, 2, 3), keepdim=True)
        noise = spread * torch.from_numpy(rng.uniform(0, most, (len(latents), 1, 1, 1))).float()
        decoded = network.decode(latents + noise * torch.randn_like(latents)).float()
    return error_of(decoded - pictures) + 1e-3 * penalty, (pictures, decoded)


def error_of(difference: Tensor) -> Tensor:
    """Return the absolute error of pixels, and of their gradients at three scales."""
    total = difference.abs().mean()
    for _ in range(3):
        total = total + 0.5 * (difference.diff(dim=2).abs().mean() + difference.diff(dim=3).abs().mean())
        difference = F.avg_pool2d(difference, 2)
    return total


def count_photographs(folder: Path) -> int:
    """Return the number of crops from sources under CC licences, which are the first rows of ``training.npy``."""
    sources = json.loads((folder / "sources.json").read_text())
    return sum(source["training"] for source in sources.values() if source["licence"].startswith("CC"))


def load_batch(crops: Array, numbers: NDArray[np.int64], rng: Generator) -> Tensor:
    """Return random parts of crops in [-1, 1], some of them mirrored or with other colours."""
    size = len(numbers)
    batch = np.empty((size, CROP, CROP, 3), np.uint8)
    for row, number in enumerate(numbers):
        y, x = rng.integers(0, crops.shape[1] - CROP + 1, 2)
        part = crops[number, y : y + CROP, x : x + CROP]
        batch[row] = part[:, :: rng.choice((1, -1)), rng.permutation(3) if rng.random() < 0.3 else slice(None)]
    pictures = to_pictures(batch)
    gain, shift = (torch.from_numpy(rng.uniform(*each, (size, 3, 1, 1))).float() for each in ((0.8, 1.1), (-0.1, 0.1)))
    changed = torch.from_numpy(rng.random((size, 1, 1, 1)) < 0.3)
    return torch.where(changed, (pictures * gain + shift).clamp(-1, 1), pictures)


def to_pictures(crops: Array) -> Tensor:
    """Return uint8 ``[b, h, w, 3]`` as pictures ``[b, 3, h, w]`` in [-1, 1], the channels last in memory."""
    return torch.from_numpy(crops).permute(0, 3, 1, 2).float() / 127.5 - 1


def scale_of_rate(step: int, progress: float) -> float:
    """Return the factor of the learning rate, which rises, stays, and falls to zero."""
    return min(1.0, (1 + step) / WARM_UP, (1 - progress) / DECAY_SHARE)


def update(network: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """Take a step of the optimizer with clipped gradients."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def follow(average: nn.Module, network: nn.Module, step: int) -> None:
    """Move the average of the weights."""
    weights = [each.detach() for each in network.parameters()]
    torch._foreach_lerp_(list(average.parameters()), weights, 1 - min(0.999, (1 + step) / (10 + step)))


# Figures


@torch.inference_mode()
def measure(pictures: Tensor, network: SmallNetwork) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    """Return figures and reconstructions by the network and by reductions, 26 px being as many values as latents."""
    found = {"small": torch.cat([network.decode(network.encode(some)) for some in pictures.split(16)]).clamp(-1, 1)}
    for side in (26, 32):
        small = F.interpolate(pictures, (side, side), mode="bicubic", antialias=True)
        found[f"bicubic {side} px"] = F.interpolate(small, pictures.shape[2:], mode="bicubic").clamp(-1, 1)
    features = load_features("efficientnet_lite0", torch.device("cpu"))
    real = features.of(to_bytes(pictures))
    figures = {}
    for name, each in found.items():
        squared = (each - pictures).square().mean(dim=(1, 2, 3)).clamp(min=1e-5)
        similarity = structural_similarity_index_measure(each, pictures, data_range=2.0)
        near = features.of(to_bytes(each))
        figures[name] = {
            "psnr": float((10 * torch.log10(4 / squared)).mean()),
            "ssim": float(similarity),  # type: ignore[arg-type]
            "frechet": frechet_distance(real, near),
            "kernel": kernel_distance(real, near)[0],
        }
    return figures, found


def to_bytes(pictures: Tensor) -> Tensor:
    """Return pictures as uint8."""
    return ((pictures + 1) * 127.5).round().byte()


def sheet(rows: list[Tensor]) -> Image.Image:
    """Return rows of pictures as one."""
    return Image.fromarray(torch.cat([to_bytes(row).permute(2, 0, 3, 1).flatten(1, 2) for row in rows]).numpy())


def report(network: SmallNetwork, flags: Flags) -> None:
    """Write the figures on held-out pictures and other photographs, and sheets of the first of them."""
    rng = default_rng(0)
    photographs = [Image.open(path).convert("RGB") for path in sorted(flags.others.iterdir())]
    crops = [np.asarray(crop_photograph(photographs[i % len(photographs)], rng)) for i in range(500)]
    held_out = np.load(flags.output_dir / "held_out.npy", mmap_mode="r")
    held_out = held_out[default_rng(0).permutation(len(held_out))[:500]]
    figures = {}
    for name, some in (("held out", held_out), ("photographs", np.stack(crops))):
        pictures = to_pictures(some)
        figures[name], found = measure(pictures, network)
        rows = [each[first : first + 12] for first in range(0, 48, 12) for each in (pictures, *found.values())]
        sheet(rows).save(flags.output_dir / f"{name}.png")
    (flags.output_dir / "figures.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


def main() -> None:
    """Build the crops, train, and write weights and figures."""
    flags = tyro.cli(Flags, prog="python -m studies.autoencoder", description=__doc__, use_underscores=True)
    torch.set_num_threads(1)
    build(flags.output_dir, flags.packages, flags.emoji)
    crops = np.load(flags.output_dir / "training.npy", mmap_mode="r")
    network = train(crops, flags)
    if flags.sharpen_minutes:
        network = sharpen(network, crops, flags)
    weights = {name: each.half().contiguous() for name, each in network.state_dict().items()}
    save_file(weights, flags.output_dir / "small.safetensors")
    report(network, flags)


if __name__ == "__main__":
    main()
