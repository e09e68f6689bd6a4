"""Which further settings give better samples after a short training of a given number of images?

The cases change settings of ``chosen`` of studies/short_runs.py that leave the cost of a step as it is, so that the
number of images measures the budget, whatever else the machine does. 11,200 images are four minutes of one CPU core.
"""

import sys
from functools import partial

from rectified_flow.flows.times import LogitNormal
from studies.harness import Flags, Study, run
from studies.short_runs import CHOSEN, case

changed = partial(case, counts_images=True)
STRATIFIED = LogitNormal(stratified=True)

STUDY = Study(
    __doc__ or "",
    {
        "chosen": changed("the reference", **CHOSEN),
        "rate 1e-3": changed("a higher distance", **CHOSEN, learning_rate=1e-3),
        "rate 4e-3": changed("a similar distance", **CHOSEN, learning_rate=4e-3),
        "linear": changed("a similar distance", **{**CHOSEN, "decay": "linear"}),
        "cooldown": changed("a similar distance; its length can be changed late", **{**CHOSEN, "decay": "cooldown"}),
        "3 iterations": changed("a similar distance", **{**CHOSEN, "optimizer": ("muon", "iterations=3")}),
        "ot": changed("a lower distance in 16 calls, as paths are straighter", **CHOSEN, flow_coupling="ot"),
        "time mean 0": changed("a similar distance", **CHOSEN, flow_time_distribution=LogitNormal(mean=0.0)),
        "stratified": changed("a lower distance, as gradients vary less", **CHOSEN, flow_time_distribution=STRATIFIED),
        "16 clusters": changed("a lower distance", clusters=16, **CHOSEN),
        "64 clusters": changed("a lower distance than with 16 clusters", clusters=64, **CHOSEN),
    },
    Flags(data=("synthetic-flowers", "fluent-emoji"), budget=(11_200,), num_samples=1000),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.short_factors"))
