"""The held-out pictures of a run, and the callbacks that evaluate the network during training."""

from math import ceil

import numpy as np
from accelerate import PartialState

from rectified_flow.cli.config import EvaluationConfig, TrainConfig
from rectified_flow.cli.data import split_of
from rectified_flow.cli.plan import MIN_TO_HOLD_OUT, proposed_share
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import RealData
from rectified_flow.evaluation.heldout import PATIENCE, HeldOutPictures, Split
from rectified_flow.evaluation.report import name_some
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.terminal import line
from rectified_flow.training.evaluations import EvaluationHook, HeldOutHook

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run by default, before the limit of MEASURED_SHARE."""
MEASURED_SHARE = 0.05
"""Largest share of a run's computations for the held-out loss, unless a flag asks for its measurement."""


def hold_out_pictures(pictures: ImageDataset, config: TrainConfig) -> Split | None:
    """Return the split by ``--holdout``, or None if nothing is held out. Collective.

    Args:
        pictures: all pictures.
        config: the flags of the run.

    Raises:
        UsageError: if a split that a flag requests leaves too few pictures in one of its parts, or
            ``--stop_when_memorising`` has no held-out pictures.
    """
    state, share, split = PartialState(), config.data.holdout, split_of(pictures, config.data)
    asked = "holdout" in config.given or config.evaluation.stop_when_memorising
    if split is None:
        if config.evaluation.stop_when_memorising:
            remedy = f"pass --holdout {proposed_share(len(pictures)):g}"
            raise UsageError(f"--stop_when_memorising needs pictures to measure on: {remedy}")
        if len(pictures) < MIN_TO_HOLD_OUT and not asked:
            text = f"none of {len(pictures)} pictures, as too few would be left: the run cannot warn when it memorises"
            state.print(line("held out", text))
        return None
    if split.problem is not None:
        if asked:
            raise UsageError(f"--holdout {share:g} leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    lost = np.setdiff1d(pictures.labels, [-1, *pictures.labels[split.training]])  # -1 is no class
    if config.network.use_cfg and len(lost) > 0:
        named = name_some([pictures.class_names[label] for label in lost])
        state.print(f"warning: no training pictures in {len(lost)} of the classes: {named}")
    return split


def build_heldout_hook(
    run: TrainingConfig, config: EvaluationConfig, training: StoreDataset, held_out: StoreDataset
) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures, and on as many training pictures.

    Raises:
        UsageError: if ``--stop_when_memorising`` would have too few measurements.
    """
    batch = run.split_batch(PartialState().num_processes)
    total = run.total_steps(batch, len(training))
    often = max(1, total // MEASUREMENTS)
    every = config.evaluate_every or min(run.save_every or often, often)
    pictures = HeldOutPictures(training, held_out, run.seed)
    if not config.evaluate_every and not config.stop_when_memorising:
        # In a step, the backward pass costs twice as much as the forward pass.
        every = max(every, ceil(pictures.passes / (3 * batch.total * MEASURED_SHARE)))
    if config.stop_when_memorising and config.evaluate_every != 0 and ceil(total / every) <= PATIENCE:
        made = f"--evaluate_every {every} makes {ceil(total / every)} in {total} steps"
        raise UsageError(f"--stop_when_memorising needs {PATIENCE + 1} measurements, but {made}: lower it")
    return HeldOutHook(pictures, every, stops=config.stop_when_memorising)


def build_evaluation_hook(
    config: EvaluationConfig, pictures: RealData, held_out: ImageDataset | None = None, *, seed: int
) -> EvaluationHook:
    """Return the callback of ``--evaluate_every``.

    Raises:
        UsageError: if the feature network is unavailable.
    """
    network, count = config.feature_network, config.evaluation_samples
    evaluator = Evaluator(pictures, network, num_samples=count, seed=seed, held_out=held_out)
    return EvaluationHook(evaluator, config.evaluate_every, keeps_best=not config.stop_when_memorising)
