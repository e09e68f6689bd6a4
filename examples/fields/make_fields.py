"""Make a folder of Gaussian random fields whose spectrum and correlation are known.

Each field is a file of NumPy: float32 [2, side, side], in physical units. The law of the fields is written to law.json
beside the folder, since the files of the folder are data.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("make_fields:make", "make_fields:MakeFlags", __doc__)

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from random_fields import Law, draw_field
from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import AtLeastTwo, Flags, Positive, Seed
from rectified_flow.system.artifact import write_output
from rectified_flow.system.files import prepare_folder, writing

LAW_FILE = "law.json"


@dataclass(frozen=True)
class FieldConfig(Flags):
    """The fields."""

    output_dir: Path = Path("fields")
    """New or empty folder for the fields."""
    num_fields: Positive = 4096
    """Number of fields."""
    side: AtLeastTwo = 32
    """Side of the fields [px]."""
    seed: Seed = 0
    """Seed of the fields."""


@dataclass(frozen=True)
class MakeFlags:
    """All flags of the program."""

    fields: FieldConfig = field(default_factory=FieldConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


def make(flags: MakeFlags) -> None:
    """Write the fields and their law."""
    config = flags.fields
    folder, law = prepare_folder("output_dir", config.output_dir), Law(config.side)
    if any(folder.iterdir()):
        raise UsageError(f"--output_dir {folder} is not empty: delete it, or choose another folder")
    law_file = folder.absolute().parent / LAW_FILE
    with writing(law_file):
        write_output(law_file, json.dumps(asdict(law), indent=1))
    with writing(folder):
        for number in range(config.num_fields):
            np.save(folder / f"{number:06}.npy", draw_field(law, config.seed, number))
    print(f"{config.num_fields} fields in {folder}, their law in {law_file}")
