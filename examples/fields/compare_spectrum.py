"""Compare the spectrum and the correlation of samples with the law of the fields that a model was trained on.

The samples are files of NumPy, [2, side, side] each. The same number of new fields is drawn from
the law and compared in the same way: they deviate from the law only because their number is limited.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("compare_spectrum:compare", "compare_spectrum:CompareFlags", __doc__)

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from random_fields import Law, draw_field
from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flags import Flags, Seed
from rectified_flow.measurements.files import read_field
from rectified_flow.measurements.scores import correlations, spectrum
from rectified_flow.system.artifact import write_output
from rectified_flow.system.files import prepare_folder, read_document, writing


@dataclass(frozen=True)
class CompareConfig(Flags):
    """The samples and their law."""

    samples: Path = Path("samples")
    """Folder of samples."""
    law: Path = Path("law.json")
    """Law of the fields, a file of make_fields.py."""
    output: Path = Path("spectrum.png")
    """File of the plot."""
    seed: Seed = 1
    """Seed of the new fields that are drawn from the law; other than that of make_fields.py."""


@dataclass(frozen=True)
class CompareFlags:
    """All flags of the program."""

    comparison: CompareConfig = field(default_factory=CompareConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


def compare(flags: CompareFlags) -> None:
    """Print the largest deviations of the samples and of new fields from the law, and plot them."""
    config = flags.comparison
    law = read_document(config.law, Law)
    samples = read_samples(config.samples, law)
    new = torch.stack([torch.from_numpy(draw_field(law, config.seed, number)) for number in range(len(samples))])
    sets = {"samples": samples, "new fields of the law": new}
    deviations = {name: 100 * (spectrum(fields) / law.spectrum() - 1) for name, fields in sets.items()}
    print(f"{len(samples)} samples, wave numbers 1 to {law.side // 2}, correlation of the law {law.correlation:.3f}")
    for name, fields in sets.items():
        largest = [f"{each:.1f}%" for each in deviations[name].abs().amax(dim=1).tolist()]
        print(f"{name}: largest deviation of the spectrum {' and '.join(largest)}, ", end="")
        print(f"correlation {correlations(fields).item():.3f}")
    prepare_folder("output", config.output.absolute().parent)
    with writing(config.output):
        write_output(config.output, plot(law, deviations))


def read_samples(folder: Path, law: Law) -> Tensor:
    """Read the samples of a folder, ``[n, 2, h, w]``."""
    paths = sorted(folder.glob("*.npy"))
    if not paths:
        raise UsageError(f"--samples {folder} has no .npy files: pass the folder that sample.py wrote")
    if further := sorted(folder.glob("grid-*.png")):  # the first call wrote grid.png
        raise UsageError(f"--samples {folder} has the samples of several calls ({further[0].name}): pass those of one")
    return torch.stack([read_sample(path, law) for path in paths])


def read_sample(path: Path, law: Law) -> Tensor:
    """Read a sample, ``[2, h, w]``."""
    try:
        values, *_ = read_field(path, channels_last=False)
    except Exception as error:  # a damaged file raises exceptions of many types
        raise UsageError(f"{path} cannot be read ({first_line(error)}): remove it") from error
    if values.shape != (2, law.side, law.side):
        raise UsageError(f"{path} has the shape {values.shape}, not that of the law: remove it, or pass its --law")
    return torch.from_numpy(values)


def plot(law: Law, deviations: dict[str, Tensor]) -> bytes:
    """Return a PNG with a column for each channel: spectra above, and below their deviations from the law [%]."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(10, 6), layout="constrained")
    numbers = range(1, law.side // 2 + 1)
    columns = zip(figure.subplots(2, 2, sharex=True).T, law.spectrum(), law.units, strict=True)
    for channel, (axes, expected, unit) in enumerate(columns):
        for each, line in zip(axes, (expected, 0 * expected), strict=True):
            each.plot(numbers, line, color="black", label="law")
        for (name, values), marker in zip(deviations.items(), "o+", strict=True):
            axes[0].plot(numbers, expected * (1 + values[channel] / 100), marker, label=name, markersize=5)
            axes[1].plot(numbers, values[channel], marker, label=name, markersize=5)
        axes[0].set(title=f"channel {channel + 1}", ylabel=f"power [({unit})$^2$]", xscale="log", yscale="log")
        axes[1].set(xlabel="wave number [cycles per side]", ylabel="deviation from the law [%]")
        axes[0].legend()
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()
