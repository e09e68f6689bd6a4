"""The pipeline of diffusers around a trained flow, and the component that loads it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self
from warnings import warn

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from numpy.typing import NDArray
from PIL.Image import Image

from rectified_flow.condition import example_texts, read_written, written
from rectified_flow.errors import LONGEST, UsageError
from rectified_flow.flows.flow import Flow, sample_batches, sampling_defaults
from rectified_flow.flows.solvers import Guidance
from rectified_flow.hub.pretrained import load_pretrained, save_pretrained
from rectified_flow.load import grid_name, model_hash, solver_name
from rectified_flow.spaces.pictures import Pictures as PictureMedium
from rectified_flow.system.pictures import GeneratedPicture, Provenance

Written = str | int | float | torch.Tensor | NDArray[np.generic]
Pictures = list[Image] | NDArray[np.float32] | torch.Tensor


class TrainedFlow:
    """The component ``flow`` of a pipeline. Its folder ``flow`` has code only; the weights are in the folder above."""

    @classmethod
    def from_pretrained(cls, folder: str, **_options: object) -> Flow:
        """Return the flow of the folder above ``folder``, ready to sample."""
        return load_pretrained(Path(folder).parent)


class FlowPipeline(DiffusionPipeline):
    """Generates pictures from noise with a trained flow.

    Args:
        flow: the flow.
    """

    flow: Flow

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.register_modules(flow=flow)  # type: ignore[attr-defined]

    def save_pretrained(self, save_directory: str | Path, **_options: object) -> None:
        """Save the model so that ``from_pretrained`` loads it; its files do not depend on options of diffusers."""
        save_pretrained(self.flow, save_directory)

    def to(self, *args: object, **kwargs: object) -> Self:
        """Move the pipeline to a device. Its weights stay in float32: another data type is ignored with a warning."""
        wanted = {each for each in (*args, kwargs.pop("dtype", None)) if isinstance(each, torch.dtype)}
        if wanted - {torch.float32}:
            remedy = "leave the data type out, or call the pipeline under torch.autocast"
            warn(f"the weights stay in float32: {remedy}", stacklevel=2)
        rest = [each for each in args if not isinstance(each, torch.dtype)]
        return super().to(*rest, **kwargs)  # type: ignore[misc]

    def __call__(
        self,
        num_images: int | None = None,
        *,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | None = None,
        seed: int = 0,
        output_type: Literal["pil", "np", "pt"] = "pil",
        return_dict: bool = True,
        batch_size: int | None = None,
        metadata: bool = True,
        **conditions: Written | Sequence[Written] | None,
    ) -> ImagePipelineOutput | tuple[Pictures]:
        """Return the pictures ``0`` to ``num_images - 1`` of a seed, which are those of ``sample.py``.

        Args:
            num_images: number of pictures; by default ``batch_size``, as in the pipelines of diffusers, or else 1.
            num_inference_steps: intervals between noise and picture; by default those of ``sample.py``.
            guidance_scale: scale of classifier-free guidance; by default that of ``sample.py``.
            generator: draws the seed of all pictures; by default ``seed`` is used.
            seed: seed of all pictures.
            output_type: ``pil``, or float32 in [0, 1] as ``np`` ``[n, h, w, c]`` or ``pt`` ``[n, c, h, w]``.
            return_dict: return the pictures as an output of diffusers, otherwise in a tuple.
            batch_size: largest number of pictures in a batch; by default 64.
            metadata: have pictures of Pillow write seed, settings and the mark of generated pictures when saved.
            conditions: values by name, or None; picture ``i`` has value ``i % n`` of each. Without any, captions are
                examples of the training data, and other conditions are drawn. If some are given, the others are "none".
        """
        _check_call(generator, num_images=num_images, batch_size=batch_size, num_inference_steps=num_inference_steps)
        flow, num_images = self.flow, num_images or batch_size or 1
        if flow.takes_source:
            raise UsageError("this model translates pictures: call pipe.flow.sample(source=pictures)")
        scale = flow.default_guidance if guidance_scale is None else guidance_scale
        if scale != 1 and "guidance" not in sampling_defaults(flow):
            raise UsageError(f"guidance has no effect on a {type(flow).__name__}: leave it out")
        if unknown := conditions.keys() - written(flow.conditions).keys():
            known = ", ".join(written(flow.conditions)) or "none"
            raise UsageError(f"{min(unknown)} is not a condition of this model: pass {known}")
        given = {name: _texts_of(each) for name, each in conditions.items() if each is not None}
        if empty := [name for name, values in given.items() if not values]:
            raise UsageError(f"`{empty[0]}` has no values: pass some, or leave it out")
        texts = given or example_texts(flow.conditions)
        if generator is not None:
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        options: dict[str, Any] = {"seed": seed, "steps": num_inference_steps or flow.default_steps}
        options |= {"guidance": Guidance(scale)} if scale != 1 else {}
        options |= {"batch_size": batch_size or 64, "conditions": read_written(flow.conditions, texts)}
        drawn = sample_batches(flow, range(num_images), render=False, **options)
        medium = flow.space.medium
        shown = medium.contents if isinstance(medium, PictureMedium) else medium.render
        values = torch.cat([shown(data).cpu() for _, data in drawn]).float() / 255
        # diffusers declares one picture, and returns a list of them.
        images: Any = VaeImageProcessor().postprocess(values, output_type, [False] * num_images)
        if output_type == "pil" and metadata:
            steps, solver, grid = options["steps"], solver_name(flow, {}), grid_name(flow, {})
            past = Provenance(model_hash(flow), seed, steps, solver=solver, time_grid=grid, guidance_scale=float(scale))
            for number, image in enumerate(images):
                own: dict[str, str | None] = {name: each[number % len(each)] for name, each in texts.items()}
                GeneratedPicture.mark(image, replace(past, number=number, conditions=own))
        return ImagePipelineOutput(images=images) if return_dict else (images,)


def _check_call(generator: object, **numbers: object) -> None:
    """Raise a UsageError unless all numbers are positive integers and ``generator`` is a torch.Generator or None."""
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, int | np.integer) and number > 0):
            advice = "pass one, and conditions by name"
            raise UsageError(f"`{name}` {str(number)[:LONGEST]} is not a positive integer: {advice}")
    if not isinstance(generator, torch.Generator | None):
        raise UsageError("`generator` is not a torch.Generator: pass one, which draws the seed of all pictures")


def _texts_of(value: object) -> list[str]:
    """Return a value of a condition, or each of several, as text."""
    value = value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [text for each in value for text in _texts_of(each)]
    return [str(value)]
