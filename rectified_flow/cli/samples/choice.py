"""The choice of the pictures that sample.py generates: from noise, or from given pictures."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rectified_flow.cli.flags.sampling import PicturesConfig
from rectified_flow.cli.samples.inputs import (
    Axis,
    Written,
    axis_of,
    cells_of,
    conditions_of,
    find_inputs,
    load_inputs,
    load_mask,
    names_of_results,
    written_conditions,
)
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import AT_ONCE, render_sources
from rectified_flow.flags import refuse
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.load import Trained
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.degradations import Degradation, Mask
from rectified_flow.spaces.fields import Fields

NUM_SAMPLES, GRID_PICTURES = 64, 100
"""Default number of samples, and largest number of pictures in a grid."""
GREY = 127
"""Value of unknown pixels on a grid."""
NOISE_LEVEL = 0.6


@dataclass(frozen=True)
class Wanted:
    """The pictures to write.

    Args:
        names: names of their files; the pictures of ``--from_images`` take turns.
        options: arguments of :func:`sample_batches`.
        shown: the first pictures uint8 ``[n, 3, h, w]`` to show before their results in the grid; None for a grid of
            samples alone.
        kept: pictures uint8 ``[n, c, h, w]`` and a mask bool ``[1, 1, h, w]`` outside of which results equal them.
        reverse: whether the flow is integrated from data to its start.
        axes: rows and columns of ``--grid``.
        written: the conditions as written; picture ``i`` has value ``i % n`` of each.
    """

    names: list[str]
    options: dict[str, Any]
    shown: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None
    reverse: bool = False
    axes: Sequence[Axis] = ()
    written: Written = field(default_factory=dict)


def choose(flags: PicturesConfig, trained: Trained, options: dict[str, Any]) -> Wanted:
    """Return the pictures to write, by the flags of the pictures.

    Args:
        flags: the flags of the pictures.
        trained: the trained flow.
        options: further arguments of :func:`sample_batches`.
    """
    flow, source = trained.flow, trained.source
    accepted = inspect.signature(flow.sample).parameters
    options = options | {"steps": flags.steps or flow.default_steps}
    axes, written = (
        [axis_of(text, flow, source) for text in flags.grid or ()],
        written_conditions(flags, flow, source),
    )
    if axes:
        written, options["draws"] = cells_of(axes, written)
    conditions = conditions_of(written, flow)
    if conditions:
        options["conditions"] = conditions
    if flags.path != "none" and ("watch" not in accepted or flags.reverse):
        kind = "--reverse" if flags.reverse else f"a {type(flow).__name__}"
        raise UsageError(f"--path has no effect: {kind} has no path to show; leave it out")
    if flags.from_images is None:
        if flow.from_source:
            raise UsageError(f"{source} translates pictures: pass some with --from_images")
        return _numbered_pictures(flags, options, axes, written)
    space, degradation = flow.space, flow.degradation
    needed = "mask" if flags.mask is not None else "start"
    is_other = space.picture_shape is None and not isinstance(space, Fields)
    if (needed not in accepted and not flow.takes_source) or is_other:
        raise UsageError(f"--from_images has no effect: {source} is a {type(flow).__name__} of other data")
    _check_translation(flags, trained, options)
    translates = flow.takes_source or flags.mask is not None
    files = find_inputs(flags.from_images, space)[: flags.num_samples or (None if translates else NUM_SAMPLES)]
    images, mask = load_inputs(files, space), load_mask(flags.mask, files, space)
    data = images if isinstance(space, Fields) else space.from_pictures(images.to(flow.device))
    if not translates:
        options |= {"start": data.cpu(), "noise_level": flags.noise_level or NOISE_LEVEL}
        return Wanted(_numbered(flags.num_samples or NUM_SAMPLES), options)
    names, kept = names_of_results(flags.from_images, files, flags.variants), None if mask is None else (images, mask)
    seen = data.cpu()
    if degradation is not None and (flags.degrade or degradation.is_projection) and not flags.reverse:
        seen = _degraded(flow, degradation, seen, flags.seed)
    elif mask is not None and flow.takes_source:
        seen = space.decode_source(space.encode(seen).masked_fill(mask, torch.nan))
    shown = render_sources(flow, seen[:GRID_PICTURES])
    if mask is not None:
        shown = shown.masked_fill(mask, GREY)
    if not flow.takes_source:
        return Wanted(names, options | {"start": seen, "mask": mask}, shown, kept, written=written)
    options["conditions"] = options.get("conditions", {}) | {SOURCE: seen}
    return Wanted(names, options, shown, kept, flags.reverse, written=written)


def _numbered_pictures(
    flags: PicturesConfig, options: dict[str, Any], axes: Sequence[Axis], written: Written
) -> Wanted:
    """Return pictures from noise: the cells of a grid, one for each prompt, or as many as are asked for."""
    if axes:
        return Wanted(_numbered(len(options["draws"])), options, axes=axes, written=written)
    if flags.prompts is None:
        return Wanted(_numbered(flags.num_samples or NUM_SAMPLES), options, written=written)
    prompts = next(iter(written.values()))
    count = flags.num_samples or len(prompts)
    slugs = [re.sub(r"\W+", "-", prompts[number % len(prompts)]).strip("-")[:60] or "prompt" for number in range(count)]
    if len({"grid", "path", *(slug.casefold() for slug in slugs)}) < 2 + count:  # two names would be the same
        slugs = [f"{number:0{len(str(count - 1))}d}-{slug}" for number, slug in enumerate(slugs)]
    return Wanted([f"{slug}.png" for slug in slugs], options, written=written)


def _degraded(flow: Flow, degradation: Degradation, data: Tensor, seed: int) -> Tensor:
    """Return degraded pictures on the CPU, each by random draws of its own."""
    parts = []
    for first in range(0, len(data), AT_ONCE):
        some = range(first, min(first + AT_ONCE, len(data)))
        with deterministic(Samples(seed, some), flow.device):
            degraded = degradation(flow.space.encode(data[some].to(flow.device)))
            parts.append(flow.space.decode_source(degraded).cpu())
    return torch.cat(parts)


def _check_translation(flags: PicturesConfig, trained: Trained, options: Mapping[str, Any]) -> None:
    """Raise a UsageError if a flag of ``--from_images`` has no effect on the flow."""
    flow, source = trained.flow, trained.source
    refuse({"degrade": flags.degrade and flow.degradation is None}, f"has no effect: {source} has no degradation")
    refuse({"noise_level": flow.takes_source and flags.noise_level}, f"has no effect: {source} translates pictures")
    paints = flow.degradation is None if not flow.takes_source else isinstance(flow.degradation, Mask)
    refuse(
        {"mask": flags.mask if not paints else None},
        f"has no effect: {source} was not trained for inpainting, by --degrade mask",
    )
    alone = not flow.takes_source and flags.mask is None
    refuse(
        {"variants": alone and flags.variants > 1},
        f"has no effect: {source} does not translate pictures; pass --num_samples",
    )
    single = flow.from_source and flow.source_noise == 0 and not isinstance(flow.degradation, Mask)
    why = f"has no effect: a source has one result with {source}, which was trained without --source_noise"
    refuse({"variants": single and flags.variants > 1}, why)
    way_back = flow.from_source and hasattr(flow, "encode")
    if flags.reverse:
        refuse({"guidance_scale": "guidance" in options}, "has no effect with --reverse; leave it out")
        refuse({"solver": options.get("solver") == "stochastic"}, "stochastic cannot be inverted: pass another solver")
    if flags.mask is not None:
        refuse({"degrade": flags.degrade}, "excludes --mask, which sets the missing pixels: pass one of them")
    why = (
        "a one-step model cannot be inverted" if isinstance(flow, FlowMap) else f"{source} does not start from pictures"
    )
    refuse({"reverse": flags.reverse and not way_back}, f"is impossible: {why}")


def _numbered(count: int) -> list[str]:
    """Return names of ``count`` samples, whose numbers have as many digits as the last one, and at least 5."""
    digits = max(5, len(str(count - 1)))
    return [f"{number:0{digits}d}.png" for number in range(count)]
