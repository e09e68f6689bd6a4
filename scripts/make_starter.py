"""Write a starter, the weights of ``--init_from starter``, from a run.

The following commands made the starters of the package. The starter for pixels took about an hour on one core. The
starter for latents of ``--autoencoder small`` took 7 minutes on a GPU, on the pictures of ``studies.starter_data``:

    rectified-flow train --dataset synthetic-flowers --image_size 32 --dim 32 --dim_mults 1 2 3
        --network blocks_per_level=1 attention_sides=[8] --dropout 0 --budget 50m --output_dir runs/starter
    python -m studies.starter --state runs/starter --minutes 6.7
    python scripts/make_starter.py RUN
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow.cli.training_flags import STARTERS
from rectified_flow.parts import name_of
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import read_config

FLAGS = ("network", "dim", "dim_mults", "dropout", "prediction")
"""Flags that describe the network and its output."""
ADDS = re.compile(r"conv_in\.|.*_embedding\.conv\.|.*(conv2|attention\.out)\.|.*skip\.bias")
"""Weights of a Unet whose products are added to its activations."""
SIZE = 4.0
"""Size of the filters of a starter, relative to random ones (docs/measurements/budget.md)."""


def with_small_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a Unet of the same function, whose filters are about ``SIZE`` times as large as random ones.

    Filters grow during a long training. A step of Muon has a fixed size, so that a run from large filters learns
    slowly. The first filters of a block may be smaller, since a normalisation follows. The outputs that layers
    add to the activations may shrink by a common factor, since each layer reads normalised activations.
    """
    sizes = {name: relative_size(value) for name, value in weights.items() if re.search(r"conv[12]\.weight", name)}
    added = [size for name, size in sizes.items() if name.endswith("conv2.weight")]
    common = min(1.0, SIZE * len(added) / sum(added))
    factors = {name: common for name in weights if ADDS.match(name)}
    for name, size in sizes.items():
        if name.endswith("conv1.weight"):
            own = min(1.0, SIZE / size)
            factors |= {name: own, name.replace("weight", "bias"): own}
    return {name: value * factors.get(name, 1.0) for name, value in weights.items()}


def relative_size(filters: Tensor) -> float:
    """Return the norm of filters ``[out, in, h, w]``, relative to that of torch's random ones."""
    return float(filters.norm() / (len(filters) / 3) ** 0.5)


def main() -> None:
    """Write the averaged weights of a run, small and in half precision, and the flags of its network."""
    parser = argparse.ArgumentParser(description="write a starter of the package from a run")
    parser.add_argument("run", type=Path, help="a run, or a checkpoint")
    parser.add_argument("--folder", type=Path, default=None, help="folder to write (default: the package's)")
    arguments = parser.parse_args()
    source = checkpoint.resolve(arguments.run)
    averaged = checkpoint.load_tensors(source, *checkpoint.averaged_files(source))
    flags = read_config(source / checkpoint.CONFIG_FILE)["training"]
    tensors = {checkpoint.MODEL_FILE: {name: value.half() for name, value in with_small_weights(averaged).items()}}
    documents = {checkpoint.CONFIG_FILE: {"data": {}, "flow": {}, "training": {name: flags[name] for name in FLAGS}}}
    folder = arguments.folder or STARTERS / (name_of(flags["autoencoder"]) or "pixels")
    print(checkpoint.save(folder, checkpoint.step_of(source), tensors, documents))


if __name__ == "__main__":
    main()
