"""One step after the same training time: rectified-flow-pytorch's mean flow beside this project's.

The peer trains with its own Trainer and its defaults. Each of this project's contenders is a row of
``one_step_study.py``, with the rectified flow that it starts from; the peer gets the processor time of the longest.
Needs `pip install -e ".[benchmark,evaluation]"`.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from one_step_study import CALLS, DISTANCE, IMAGE_SIZE, pictures
from one_step_study import Flags as StudyFlags
from peer import PEER, PeerMeanFlow, train_peer

from rectified_flow import randomness
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.runs import checkpoint
from rectified_flow.system.pictures import to_grid, write_picture


@dataclass(frozen=True)
class Flags:
    data: str = "synthetic-flowers"
    """A value of --dataset, or a folder."""
    cpu_minutes: float = 20
    """Processor time of the training [minutes]."""
    dim: int = 12
    """Channels of the peer's Unet. With 12 it has 1.35 M parameters, and that of the study 1.2 M."""
    seed: int = 0
    """Training seed."""
    num_samples: int = 256
    """Generated images per distance."""
    output_dir: Path = Path("runs/one-step-study")
    """Folder for the run, its results and pictures."""


def main(flags: Flags) -> None:
    torch.set_num_threads(1)
    folder = flags.output_dir / f"{Path(flags.data).name}-{PEER}-{flags.dim}-{flags.cpu_minutes:g}min-{flags.seed}"
    data = pictures(StudyFlags(data=flags.data))
    build = partial(PeerMeanFlow, flags.dim, IMAGE_SIZE)
    train_peer(build, data, folder, flags.cpu_minutes, flags.seed)
    source = checkpoint.resolve(folder)
    images = checkpoint.load_document(source, "run.json")["images"]
    evaluator = Evaluator(
        data, "efficientnet_lite0", join_processes(), num_samples=flags.num_samples, seed=flags.seed, batch_size=32
    )
    print(f"{PEER}, mean flow, {flags.cpu_minutes:g} CPU minutes, {images:,} images; Fréchet and kernel distances\n")
    print("| weights | " + " | ".join(f"{calls} calls" for calls in CALLS) + " |\n|---|" + "---|" * len(CALLS))
    for name, weights in {"averaged": checkpoint.EMA_FILE, "raw": checkpoint.MODEL_FILE}.items():
        flow: Any = build()
        checkpoint.load_weights(flow, source, weights)
        found: dict[str, dict[str, Any]] = {
            str(calls): evaluator.distances(evaluator.generate(flow.eval(), steps=calls)) for calls in CALLS
        }
        folder.with_name(f"{folder.name}-{name}.json").write_text(json.dumps({"images": images, **found}))
        cells = (
            f"{each[DISTANCE.format('frechet')]:.0f} / {each[DISTANCE.format('kernel')]:.3f}" for each in found.values()
        )
        print(f"| {name} | {' | '.join(cells)} |")
        with randomness.deterministic(randomness.Samples(flags.seed, range(36))):
            write_picture(
                folder.with_name(f"{folder.name}-{name}.png"), to_grid(flow.space.render(flow.sample(36, steps=1)))
            )


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
