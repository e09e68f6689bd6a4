"""What ``one_step_study.py`` tries, one factor at a time, and what each was expected to do."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow.flows.times import LogitNormal, UShaped


@dataclass(frozen=True)
class Factor:
    """One deviation from the default.

    Args:
        expected: what it was expected to do, written down before it ran.
        flow: settings of :class:`StudyFlow`; None trains a rectified flow.
        run: settings of the run.
        after: the factor whose trained weights it starts from; None starts from nothing.
        taught: whether the flow of these weights is its teacher, too.
        wakes: whether the interval's embedding starts at random instead of zero.
        rectified: settings of the rectified flow.
        length: of the training, as a multiple of the flag.
        paths: how many the flow of these weights draws to train on, as a share of the training images.
    """

    expected: str
    flow: Mapping[str, Any] | None = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    after: str | None = "rectified"
    taught: bool = False
    wakes: bool = False
    rectified: Mapping[str, Any] = field(default_factory=dict)
    length: float = 1
    paths: float = 0


ALIKE = {"weight_power": 0.0}
UNCLIPPED = {"max_grad_norm": 3.0 * 32**2}
"""With rows weighted alike, the loss is a sum over the elements of a picture, here of 32 px: the limit of its mean."""
LAGRANGIAN = {"along": "lagrangian"}
SHARES = {"share": True}
LOWER = {"learning_rate": 1e-3, "lr_decay": "cosine"}
LOWERED = ", half the rate, falling to 0"
DRAWN: dict[str, Any] = {"run": LOWER, "paths": 1 / 8, "length": 1.08}
"""Drawing and training cost as much as the training of a mean flow on as many images as the flag says."""
TEACHER = {"whole": 0.5, "mean_fraction": 1.0}
"""What --teacher learns from."""
FACTORS = {
    "rectified": Factor("the reference", None, after=None, length=4),
    "rectified, clean": Factor(
        "a little behind rectified", None, after=None, rectified={"prediction": "clean"}, length=4
    ),
    "default": Factor("better in one call, worse at 16"),
    "velocity rows only": Factor("better than rectified at 16 calls; if not, it is the restart", {"mean_fraction": 0}),
    "a quarter of the rate": Factor(
        "better at 16 calls, if the rate, and not the objective, spoils the velocity", run={"learning_rate": 5e-4}
    ),
    "the rate falls to 0": Factor(
        "better in every column: what is left is noise of the updates", run={"lr_decay": "cosine"}
    ),
    "a quarter of the rate, taught": Factor("better than without a teacher", run={"learning_rate": 5e-4}, taught=True),
    LOWERED.removeprefix(", "): Factor("the best of both", run=LOWER),
    "paths": Factor("better in one call: nothing but regression, and no noise in the target", **DRAWN),
    "whole paths": Factor("the best in one call: what this network can do there", {"whole": 1.0}, **DRAWN),
    "half whole paths": Factor("in one call as whole paths, at 2 to 16 as paths", {"whole": 0.5}, **DRAWN),
    "half whole paths, all of the rows": Factor("no worse: paths have velocities, too", TEACHER, **DRAWN),
    "half whole paths, all of the rows, a quarter as many": Factor(
        "the best: cheaper to draw, and trained for longer",
        TEACHER,
        **(DRAWN | {"paths": 1 / 32, "length": 1.58}),
    ),
    "half whole paths, all of the rows, a quarter as many, edges": Factor(
        "sharper in one call, and nearer",
        TEACHER | {"edges": 5.0},
        **(DRAWN | {"paths": 1 / 32, "length": 1.58}),
    ),
    "matched": Factor(
        "sharper and nearer in one call: matching a distribution does not average pictures",
        TEACHER | {"matching": 0.5, "pull": 0.15},
        taught=True,
        **(DRAWN | {"paths": 1 / 32, "length": 0.8}),
    ),
    "matched, a fifth as strong": Factor(
        "stable, and sharper: with a pull of 1, pictures fell apart",
        TEACHER | {"matching": 0.5, "pull": 0.03},
        taught=True,
        **(DRAWN | {"paths": 1 / 32, "length": 0.8}),
    ),
    "unmatched": Factor(
        "behind matched, which takes as many steps", TEACHER, **(DRAWN | {"paths": 1 / 32, "length": 0.8})
    ),
    "half whole paths, twice the rate": Factor(
        "better in one call", {"whole": 0.5}, **(DRAWN | {"run": {"lr_decay": "cosine"}})
    ),
    "half whole paths, a quarter as many": Factor(
        "worse in one call: they are learned by heart", {"whole": 0.5}, **(DRAWN | {"paths": 1 / 32, "length": 1.58})
    ),
    "reflow": Factor(
        "the best in one call so far",
        None,
        rectified={"distance": "pseudo_huber", "time_distribution": UShaped()},
        **DRAWN,
    ),
    "reflow, a quarter as many": Factor(
        "better: cheaper to draw, and trained for longer",
        None,
        rectified={"distance": "pseudo_huber", "time_distribution": UShaped()},
        **(DRAWN | {"paths": 1 / 32, "length": 1.58}),
    ),
    "shares, power 0": Factor("better at 16 calls; the best on a toy", SHARES | ALIKE, UNCLIPPED),
    "lagrangian": Factor("better in one call: no derivative by x", LAGRANGIAN),
    "lagrangian, shares, power 0": Factor(
        "better than shares, power 0, in one call", LAGRANGIAN | SHARES | ALIKE, UNCLIPPED
    ),
    "lagrangian, shares, power 0, taught": Factor(
        "the best in one call", LAGRANGIAN | SHARES | ALIKE, UNCLIPPED, taught=True
    ),
    "clean": Factor("better in one call: nothing is left of the noise", {"clean": True}, after="rectified, clean"),
    "clean, taught": Factor("better than clean", {"clean": True}, after="rectified, clean", taught=True),
} | {
    name + LOWERED: replace(factor, run={**LOWER, **factor.run})
    for name, factor in {
        "mean_flow": Factor("as the default, or a little worse", {"objective": "mean_flow"}),
        "so_flow": Factor("as the default", {"objective": "so_flow"}),
        "growing": Factor("better at 16 calls: short intervals first (arXiv:2511.19065)", {"growing": True}),
        "power 0": Factor("worse in one call, better at 16", ALIKE, UNCLIPPED),
        "power 0.5": Factor(
            "little difference: every row's gradient has the same norm (tangent normalization, arXiv:2410.11081)",
            {"weight_power": 0.5},
            {"max_grad_norm": 3.0**0.5 * 32},
        ),
        "warm-up": Factor(
            "better at 2 to 16 calls, worse in one: less of the training has its derivative", {"warms": True}
        ),
        "two heads": Factor(
            "better at 16 calls, as intervals have a layer of their own, and cheaper", {"two_heads": True}
        ),
        "short average": Factor("no difference: the rate falls to 0", run={"ema_decay": 0.98}),
        "shares": Factor("better at 2 to 16 calls: intervals of all lengths are seen", SHARES),
        "a quarter of the rows": Factor("better at 16 calls, worse in one", {"mean_fraction": 0.25}),
        "three quarters of the rows": Factor("worse at 16 calls", {"mean_fraction": 0.75}),
        "rectified's times": Factor("little difference", {"time_distribution": LogitNormal()}),
        "no clipping": Factor("worse: norms of 2 to 6 are common", run={"max_grad_norm": 0.0}),
        "bf16": Factor("no difference", run={"mixed_precision": "bf16"}),
        "awake embedding": Factor("no difference", wakes=True),
        "long memory": Factor("little difference", run={"adam_betas": (0.9, 0.999)}),
        "from nothing": Factor("behind: the velocity is learned late", after=None, length=5),
    }.items()
}


KNOWN_AS = {"half whole paths, all of the rows, a quarter as many": "from a teacher"}
"""Short names of factors in plots."""
