"""Run the commands for several machines and print what came of each as a table; root only.

python -m tests.several_machines [WORDS ...] runs the cases whose title contains one of the words.
"""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.several_machines.cases import CASES, Lab
from tests.several_machines.rig import Rig


def main(words: list[str]) -> int:
    """Run the chosen cases; returns the number of those that failed."""
    if os.geteuid() != 0:
        print("this makes network namespaces and needs root: sudo make several-machines", file=sys.stderr)
        return 1
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        print(f"install {' and '.join(missing)} (Debian: iproute2, util-linux)", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="several-machines-"))
    print(f"two network namespaces of one machine, Linux {platform.release()}; runs are in {folder}", flush=True)
    table = Table(words)
    with Rig(folder) as rig:
        lab = Lab(rig)
        for number, (title, case) in enumerate(CASES.items()):
            with rig.quiet():
                table.add(title, partial(case, lab, folder / f"run-{number}"))
    print("\n".join(["", *table.rows]))
    if table.failed == 0:
        shutil.rmtree(folder)
    else:
        print(f"{table.failed} failed; see {folder}")
    return table.failed


class Table:
    """Outcomes of the cases whose title contains one of ``words``, or of all cases."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.failed = words, 0
        self.rows = ["| | outcome | seconds |", "|---|---|---|"]

    def add(self, title: str, case: Callable[[], str]) -> None:
        """Run a case, if it is wanted."""
        if self.words and not any(word in title for word in self.words):
            return
        began = time.monotonic()
        try:
            outcome = case()
        except AssertionError as error:
            outcome, self.failed = f"FAILED: {str(error).strip()[-300:]}", self.failed + 1
        row = f"| {title} | {outcome} | {time.monotonic() - began:.0f} |"
        print(row, flush=True)
        self.rows.append(row)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
