"""Plot distance against the number of sampling steps, for several runs that evaluate.py has evaluated.

A line is NAME:RUN, where RUN is a folder with an evaluation.json that was written by
`evaluate.py --checkpoint RUN --steps 1 2 4 8 16 32 --solver euler` (without --solver for a mean flow, which has none).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow.system.pictures import Line, draw_lines


@dataclass(frozen=True)
class Flags:
    lines: tuple[str, ...]
    """NAME:RUN of each line."""
    distance: str = "efficientnet_lite0_frechet_distance"
    """Distance to plot."""
    output: Path = Path("steps.png")
    """Image file to write."""


def main(flags: Flags) -> None:
    lines: dict[str, Line] = {}
    for name, run in (line.split(":", 1) for line in flags.lines):
        results = sorted(json.loads((Path(run) / "evaluation.json").read_text()), key=lambda each: each["steps"])
        lines[name] = ([each["steps"] for each in results], [each["distances"][flags.distance] for each in results])
    steps = sorted({step for line in lines.values() for step in line[0]})
    print(f"| {flags.distance} | " + " | ".join(f"{step} step{'s' * (step > 1)}" for step in steps) + " |")
    print("|---|" + "---|" * len(steps))
    for name, (at, values) in lines.items():
        found = dict(zip(at, values, strict=True))
        print(f"| {name} | " + " | ".join(f"{found[step]:.4g}" if step in found else "" for step in steps) + " |")
    print(draw_lines(flags.output, lines, "fewer steps", "network calls", flags.distance, log_x=True, log_y=True))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
