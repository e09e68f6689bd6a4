"""evaluate.py --likelihood: bits per dimension of training, held-out and given pictures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.cli.data import check_fields
from rectified_flow.cli.flags.sampling import EvaluateConfig, SolverConfig
from rectified_flow.data.open import open_images, picture_names
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import permuted
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import RunError, UsageError
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.likelihood import Pictures, measure
from rectified_flow.flags import flag_types, refuse
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import Trained
from rectified_flow.randomness import mix
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.pixels import RGB, Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import writing
from rectified_flow.system.outputs import write_output
from rectified_flow.system.pictures import Panel, draw_panels, to_grid, with_texts, write_picture
from rectified_flow.system.terminal import lines

LIKELIHOOD_FILE, HISTOGRAM_FILE, STRANGEST_FILE = FILES = ("likelihood.json", "likelihood.png", "strangest.png")
STEPS, PROBES, BINS = 16, 1, 20
MOST_PICTURES = 128
"""Largest number of training pictures, and of held-out pictures, that are measured."""
SHOWN = 32
"""Number of pictures on the sheet of the strangest ones."""
UNUSED = (*flag_types(SolverConfig), "num_samples", "steps", "feature_network", "metric", "source_path")
"""Flags that have no effect on the likelihood, beside the precision."""


def check_likelihood(config: EvaluateConfig, trained: Trained) -> None:
    """Check the flags and the flow before any picture is read.

    Raises:
        UsageError: if a flag has no effect, or the likelihood of 8-bit pictures is undefined for the flow.
    """
    given = config.program.given or ()
    refuse({name: name in given for name in UNUSED}, "has no effect with --likelihood: leave it out")
    inexact = config.model.mixed_precision != "no"
    refuse({"mixed_precision": inexact}, "is too inexact for --likelihood: leave it out")
    if (problem := _problem_with(trained.flow)) is not None:
        raise UsageError(f"--likelihood is impossible with {trained.source}: {problem}")


def _problem_with(flow: Flow) -> str | None:
    """Return the reason why a flow has no likelihood of 8-bit pictures, or None."""
    if not isinstance(flow, RectifiedFlow):
        return f"a {type(flow).__name__} has no ODE; pass a run of train_oxford.py"
    if flow.takes_source:
        return "it translates pictures; pass a run without --source_path and --degrade"
    if flow.space.has_missing:
        return "its fields have unknown values; pass a run on fields without NaN"
    if type(flow.space) not in (Pixels, Fields):  # a subclass may have other units
        return f"its space is {type(flow.space).__name__}, not Pixels; pass a run without --autoencoder and --space"
    if flow.prediction == "clean":
        return "the velocity of a clean prediction does not exist at time 0; pass a run with --prediction velocity"
    return None


def measure_likelihood(
    config: EvaluateConfig,
    trained: Trained,
    dataset: ImageDataset | RenderedItems,
    held_out: ImageDataset | None,
    folder: Path,
) -> None:
    """Measure, print and save the likelihood of pictures. Collective.

    Args:
        config: all flags.
        trained: a trained flow that :func:`check_likelihood` accepts.
        dataset: its training pictures.
        held_out: its held-out pictures, if there are any.
        folder: where the results are written.

    Raises:
        UsageError: if there are no 8-bit pictures, they have transparency, or those of a folder cannot be read.
        RunError: if an estimate is not finite, or the results cannot be written.
        Interrupted: on every process, if a stop was requested on one.
    """
    flags, flow, state = config.samples, trained.flow, PartialState()
    assert isinstance(flow, RectifiedFlow)
    groups = _groups(config, dataset, held_out, flow.space)
    given = groups.get("given")
    check_equal(state, lambda: {"the pictures of --likelihood": given and given.data.fingerprint})
    how = {"steps": flags.likelihood_steps or STEPS, "probes": flags.likelihood_probes or PROBES, "seed": flags.seed}
    estimates = measure(flow, list(groups.values()), batch_size=config.model.batch_size, **how)
    if not all(each.isfinite().all() for each in estimates):
        raise RunError(f"the ODE of {trained.source} diverges for some of the pictures: raise --likelihood_steps")
    if not state.is_main_process:
        return
    bits = dict(zip(groups, estimates, strict=True))
    summaries = {name: _summary(groups[name], each) for name, each in bits.items()}
    result = {"checkpoint": str(trained.source), "weights": trained.weights, "dataset": dataset.info.source, **how}
    with writing(folder / LIKELIHOOD_FILE):
        write_output(folder / LIKELIHOOD_FILE, json.dumps(result | {"pictures": summaries}, indent=1))
    with writing(folder / HISTOGRAM_FILE):
        draw_panels(folder / HISTOGRAM_FILE, [_histogram(bits)])
    last = list(groups)[-1]
    write_picture(folder / STRANGEST_FILE, _strangest(groups[last], bits[last]))
    texts = {name: _line(each) for name, each in summaries.items()}
    steps, probes = how["steps"], how["probes"]
    counts = f"{steps} Runge-Kutta step{'s' * (steps > 1)}, {probes} probe{'s' * (probes > 1)} for each picture"
    texts["solver"] = f"{counts}, seed {how['seed']}"
    texts |= {"results": str(folder / LIKELIHOOD_FILE), "histogram": str(folder / HISTOGRAM_FILE)}
    tqdm.write(lines(texts | {"strangest": f"{folder / STRANGEST_FILE}: {last} pictures, the least likely first"}))


def _groups(
    config: EvaluateConfig, dataset: ImageDataset | RenderedItems, held_out: ImageDataset | None, space: Space
) -> dict[str, Pictures]:
    """Return the pictures to measure by the name of their group, those of a folder last."""
    if isinstance(dataset, RenderedItems):
        raise UsageError("--likelihood needs pictures of 8 bits: pass a folder of them with --dataset_path")
    if dataset.info.fields is None and len(dataset.read_entries([0])["images"][0]) != RGB:
        raise UsageError("--likelihood is impossible for pictures with transparency: pass a run without --alpha")
    groups = {}
    for name, data in {"training": dataset, "held out": held_out}.items():
        if data is not None:
            count = min(len(data), MOST_PICTURES)
            some = data.subset(permuted(np.arange(count), len(data), mix(config.samples.seed, "likelihood")))
            groups[name] = Pictures(some, picture_names(some))
    for path in config.samples.likelihood or ():
        try:
            given = open_images(**dataset.arguments | {"dataset": "", "dataset_path": path})
        except UsageError as error:
            raise UsageError(str(error).replace("--dataset_path", "--likelihood")) from error
        check_fields(space, given, f"--likelihood {path}")
        if given.info.fields is not None and given.info.fields.missing:
            raise UsageError(
                f"--likelihood {path} has fields with unknown values, which have no likelihood: remove them"
            )
        groups["given"] = Pictures(given, picture_names(given), conditional=False)
    return groups


def _summary(pictures: Pictures, estimates: Tensor) -> dict[str, Any]:
    """Return the mean over pictures, and the figure of each, with their standard errors; None for unknown ones."""
    mean = estimates.mean(dim=1)
    rows = zip(pictures.names, mean.tolist(), _standard_errors(estimates), strict=True)
    each = [{"name": name, "bits_per_dimension": bits, "standard_error": error} for name, bits, error in rows]
    [error] = _standard_errors(mean[None])
    return {"bits_per_dimension": mean.mean().item(), "standard_error": error, "each": each}


def _standard_errors(values: Tensor) -> list[float | None]:
    """Return the standard error of the mean of each row of ``values`` ``[b, n]``; None for a single value."""
    count = values.shape[1]
    return [None] * len(values) if count < 2 else (values.std(dim=1) / count**0.5).tolist()


def _line(summary: Mapping[str, Any]) -> str:
    """Return the mean of a group, its standard error, and the mean standard error of one picture."""
    error, each = summary["standard_error"], [row["standard_error"] for row in summary["each"]]
    errors = [] if error is None else [f"standard error {error:.3f}"]
    errors += [] if None in each else [f"mean standard error of a picture {sum(each) / len(each):.4f}"]
    count = f"{len(each)} picture{'s' * (len(each) > 1)}"
    return ", ".join((f"{summary['bits_per_dimension']:.3f} bits per dimension (mean of {count})", *errors))


def _histogram(bits: Mapping[str, Tensor]) -> Panel:
    """Return the share of the pictures of each group in bins of bits per dimension."""
    means = {name: each.mean(dim=1).numpy() for name, each in bits.items()}
    edges = np.histogram_bin_edges(np.concatenate([*means.values()]), BINS)
    centres = ((edges[:-1] + edges[1:]) / 2).tolist()
    shares = {name: np.histogram(each, edges)[0] / len(each) for name, each in means.items()}
    curves = {name: dict(zip(centres, each.tolist(), strict=True)) for name, each in shares.items()}
    return Panel(curves, "likelihood of pictures", "bits per dimension", "share of the pictures", is_histogram=True)


def _strangest(pictures: Pictures, estimates: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pictures with the lowest likelihood on a sheet, each above its bits per dimension and its name."""
    bits = estimates.mean(dim=1)
    worst = bits.argsort(descending=True, stable=True)[:SHOWN].tolist()
    texts = [f"{bits[index]:.3f} {Path(pictures.names[index]).name}" for index in worst]
    return to_grid(with_texts(pictures.data.read_pictures(worst), texts), columns=8)
