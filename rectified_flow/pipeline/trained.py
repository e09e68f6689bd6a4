"""The pipeline of diffusers that generates pictures with a flow, and its component, which loads the flow."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from rectified_flow.condition import WrittenCondition, chosen
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.solvers import Guidance
from rectified_flow.hub import load_pretrained
from rectified_flow.networks.captions import Caption


class TrainedFlow:
    """The component ``flow`` of a pipeline. Its folder ``flow`` has code only; the weights are in the folder above."""

    @classmethod
    def from_pretrained(cls, folder: str, **_options: Any) -> Flow:
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

    def __call__(
        self,
        num_images: int = 1,
        *,
        steps: int | None = None,
        seed: int = 0,
        guidance: float | None = None,
        batch_size: int = 64,
        **conditions: str | int | float | Sequence[str | int | float],
    ) -> ImagePipelineOutput:
        """Return the pictures ``0`` to ``num_images - 1`` of a seed, which are those of ``sample.py``.

        Args:
            num_images: number of pictures.
            steps: intervals between noise and picture; by default those of ``sample.py``.
            seed: seed of all pictures.
            guidance: scale of classifier-free guidance; by default that of ``sample.py``.
            batch_size: largest number of pictures in a batch.
            conditions: values by name; picture ``i`` has value ``i % n`` of each. Without any, captions are examples of
                the training data, and other conditions are drawn. If some are given, the others are "none".

        Raises:
            UsageError: if the flow takes no such condition or guidance, or translates pictures.
        """
        flow, options = self.flow, dict[str, Any](steps=steps or self.flow.default_steps)
        if flow.takes_source:
            raise UsageError("this model translates pictures: call pipe.flow.sample(source=pictures)")
        scale = getattr(flow, "default_guidance", 1.0) if guidance is None else guidance
        if scale != 1:
            if "guidance" not in signature(flow.sample).parameters:
                raise UsageError(f"guidance has no effect on a {type(flow).__name__}: leave it out")
            options["guidance"] = Guidance(scale)
        options |= {"seed": seed, "batch_size": batch_size, "conditions": self._values(conditions)}
        batches = sample_batches(flow, range(num_images), render=False, **options)
        pictures = (each for _, data in batches for each in flow.space.render_with_alpha(data).cpu())
        return ImagePipelineOutput(images=[to_pil_image(each) for each in pictures])

    def _values(self, written: dict[str, Any]) -> dict[str, Tensor]:
        """Return the values of the conditions that a caller writes."""
        kinds = {
            name: kind for name, kind in chosen(self.flow.conditions).items() if isinstance(kind, WrittenCondition)
        }
        captions = {name: kind.examples for name, kind in kinds.items() if isinstance(kind, Caption) and kind.examples}
        written = written or captions
        if unknown := written.keys() - kinds.keys():
            raise UsageError(f"{min(unknown)} is not a condition of this model: pass {', '.join(kinds) or 'none'}")
        values = {}
        for name, kind in kinds.items() if written else ():
            given = written.get(name)
            several = [given] if isinstance(given, str | int | float) else given
            values[name] = kind.none(1, torch.device("cpu")) if several is None else kind.parse([*map(str, several)])
        return values
