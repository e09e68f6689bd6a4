"""The callbacks of a run: the sheet of its data, the loss on held-out pictures, and evaluations of its samples."""

from collections.abc import Sequence
from math import ceil

from accelerate import PartialState

from rectified_flow.cli.open_data import OpenData
from rectified_flow.cli.training_flags import EvaluationConfig
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed import on_main
from rectified_flow.evaluation.evaluator import METRICS, Comparison, Evaluator, suited
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import MAX_PICTURES, MIN_HELD_OUT, TIMES, HeldOutPictures
from rectified_flow.evaluation.scores import estimates
from rectified_flow.flows.flow import Flow
from rectified_flow.runs.folder import DATA_SHEET
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.files import replace_file, writing
from rectified_flow.system.terminal import line
from rectified_flow.training.copies import CopiesHook
from rectified_flow.training.evaluations import Callback, EvaluationHook, HeldOutHook
from rectified_flow.training.sheet import DataSheet, DataSheetHook

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run by default, before the limit of MEASURED_SHARE."""
MEASURED_SHARE = 0.05
"""Largest share of a run's computations for the held-out loss, unless a flag asks for its measurement."""


def build_callbacks(
    run: TrainingConfig,
    flags: EvaluationConfig,
    flow: Flow,
    data: OpenData,
    words: Sequence[str],
    pictures: ImageDataset | None,
) -> list[Callback]:
    """Return the callbacks of a run: the sheet of the data, the held-out loss, distances of samples, and copies.

    Args:
        run: the flags of the training.
        flags: the flags of the evaluation.
        flow: the flow.
        data: the data of the run.
        words: sentences about the data.
        pictures: the pictures that are trained on; None for the data of a teacher, and for items of a dataset.
    """
    callbacks: list[Callback] = [DataSheetHook(words, pictures, data.choices)]
    training, held_out = data.divide(data.rows)
    if held_out is not None:
        callbacks.append(build_heldout_hook(run, flags, training, held_out))
    if flags.evaluate_every:
        callbacks.append(build_evaluation_hook(run, flags, flow, data))
    counts_copies = "copies" in flow.space.medium.metrics and not flow.takes_source
    if pictures is not None and data.lacks_held_out and counts_copies:
        callbacks.append(CopiesHook(pictures, flow.space.medium))
    return callbacks


def build_evaluation_hook(run: TrainingConfig, flags: EvaluationConfig, flow: Flow, data: OpenData) -> EvaluationHook:
    """Return the callback that evaluates samples during training."""
    real, unseen = data.divide(data.items)
    if not hasattr(real, "read_pictures"):  # items of a registered dataset
        real = RenderedItems(real, flow.space, data.description.name)
    evaluator = Evaluator(
        real,
        flags.feature_network,
        num_samples=flags.evaluation_samples,
        seed=run.seed,
        held_out=unseen,
        metrics=(*suited(METRICS, flow, real, unseen), *flags.evaluate_metric),
        medium=flow.space.medium,
    )
    if "likelihood" in flags.evaluate_metric:  # refused now, and not at the first evaluation
        estimates(Comparison(evaluator, flow, {"steps": 1}), real, [0], [0])
    return EvaluationHook(evaluator, flags.evaluate_every, keeps_best=not flags.stop_when_memorising)


def build_heldout_hook(
    run: TrainingConfig, flags: EvaluationConfig, training: StoreDataset, held_out: StoreDataset
) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures, and on as many training pictures."""
    batch = run.split_batch(PartialState().num_processes)
    total = run.total_steps(batch, len(training))
    often = max(1, total // MEASUREMENTS)
    every = flags.evaluate_every or min(run.save_every or often, often)
    if flags.evaluate_every or flags.stop_when_memorising:
        return HeldOutHook(HeldOutPictures(training, held_out, run.seed), every, stops=flags.stop_when_memorising)
    # In a step, the backward pass costs twice as much as the forward pass. A short run measures at least twice: before
    # its first step, and after the last one.
    passes = 3 * batch.total * total * MEASURED_SHARE / 2
    most = min(MAX_PICTURES, max(MIN_HELD_OUT, int(passes / (2 * TIMES))))
    pictures = HeldOutPictures(training, held_out, run.seed, most)
    return HeldOutHook(pictures, max(every, ceil(pictures.passes / (3 * batch.total * MEASURED_SHARE))), stops=False)


def write_sheet_of_dry_run(
    flow: Flow, pictures: ImageDataset, words: Sequence[str], run: TrainingConfig, *, mirrored: bool
) -> None:
    """Write the sheet of the data beside the store of the pictures, as a dry run leaves the output folder alone."""
    state = PartialState()
    batch = run.split_batch(state.num_processes).total
    path = pictures.path.with_name(f"{pictures.path.name}-{DATA_SHEET}")

    def write() -> None:
        flow.space.medium.prepare(flow.device)
        sheet = DataSheet(flow, pictures, words, pictures, run.seed, batch, mirrored)
        content = sheet.encoded()
        if content is not None:
            with writing(path):
                replace_file(path, content, durable=False)
            state.print(line("data sheet", path))

    on_main(state, write)
