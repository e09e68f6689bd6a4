"""Flows that come back from a checkpoint, a folder or the Hugging Face hub, built from their own description."""

import json
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, cast

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
from torch import nn

from rectified_flow.errors import UsageError
from rectified_flow.registry import DescriptionError, build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE
from rectified_flow.runs.document import upgraded
from rectified_flow.system.files import replace_file

HUB_CONFIG = "config.json"
LIBRARY = "rectified-flow-trainer"
TASK = "unconditional-image-generation"
OWN_KINDS = (
    *("flows.rectified", "flows.mean", "flows.flow_map", "networks.unet"),
    *("spaces.pixels", "spaces.autoencoders", "spaces.latents"),
)
"""Modules that register the project's own kinds, which import this one."""

MODEL_CARD = """---
{{ card_data }}
---

# {{ title | default("A " + kind, true) }}

{{ kind }} of {{ noun }}{% if classes %} in {{ classes }} classes{% endif %}, {{ parameters }} M parameters.
{%- if dataset %} Trained on {{ dataset }}.{% endif %}
{% if grid %}
![samples]({{ grid }})
{% endif %}
```python
{% if module %}import {{ module }}  # registers the {{ kind }}
{% endif %}from rectified_flow import {{ loader }}

flow = {{ loader }}.from_pretrained({{ repo_id | default("this folder", true) | tojson }})
samples = flow.sample(16)  # {{ shape }}
```
{% if results %}
## Evaluation

| pictures | measure | value |
|---|---|---|
{% for result in results %}{% for name, number in result.numbers.items() -%}
| {{ result.how }} | {{ name }} | {{ number }} |
{% endfor %}{% endfor %}{% endif %}
{%- if command %}
## Training

```bash
{{ command }}
```
{% endif %}
## Settings

```json
{{ config }}
```
"""


def load_flow(path: Path) -> nn.Module:
    """The flow of a checkpoint, or of a run's newest, with averaged weights if there are any; ready to sample.

    Raises:
        UsageError: if there is no checkpoint, it is damaged, or it holds a kind that is not registered.
    """
    return checkpoint.read(path, _load_flow)


def _load_flow(path: Path) -> nn.Module:
    if not (path / FLOW_FILE).exists():
        raise UsageError(
            f"checkpoint {path} has no {FLOW_FILE}, as its flow or network was not registered in training: build the "
            "flow by hand and load its weights with rectified_flow.runs.checkpoint.load_averaged"
        )
    flow = build_flow(checkpoint.load_description(path), path / FLOW_FILE)
    checkpoint.load_averaged(network_of(flow), path)
    return flow.eval()


def build_flow(description: Mapping[str, Any], source: Path) -> nn.Module:
    """Build the flow of a description with fresh weights; ``source`` is the file or folder that an error names.

    Raises:
        UsageError: if it describes no flow, or a kind that is not registered.
    """
    for module in OWN_KINDS:
        import_module(f"rectified_flow.{module}")
    try:
        flow = build(upgraded(description, source))
    except DescriptionError as error:
        raise UsageError(f"{source}: {error}") from error
    if not isinstance(flow, nn.Module):
        raise UsageError(f"{source} describes a {type(flow).__name__}, not a flow")
    return flow


def network_of(flow: nn.Module) -> nn.Module:
    """The module whose weights are a flow's: its ``network``, if nothing outside of that has any."""
    network = getattr(flow, "network", None)
    if isinstance(network, nn.Module) and len(network.state_dict()) == len(flow.state_dict()):
        return network
    return flow


class Saved(ModelHubMixin):
    """A flow that can be described, saved and loaded, as its parts are :mod:`registered <rectified_flow.registry>`."""

    network: nn.Module
    space: Any
    conditions: Any

    def describe(self) -> dict[str, Any]:
        """Everything that building this flow again takes, as JSON can hold it.

        Raises:
            UsageError: if a part is not registered.
        """
        return describe(self)

    @classmethod
    def from_description(cls, description: Mapping[str, Any], source: Path | str = "the description") -> Self:
        """Build the flow that ``describe`` described, with fresh weights.

        Raises:
            UsageError: if it is of another class than this, or describes no flow.
        """
        return cls._checked(build_flow(description, Path(source)))

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Self:
        """As :func:`load_flow`, for a flow of this class.

        Raises:
            UsageError: as there, or if it is of another class.
        """
        return cls._checked(load_flow(Path(path)))

    @classmethod
    def _checked(cls, flow: nn.Module) -> Self:
        if not isinstance(flow, cls):
            raise UsageError(f"the model is a {type(flow).__name__}, not a {cls.__name__}")
        return flow

    def generate_model_card(
        self, *, grid: str | None = None, metadata: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> ModelCard:
        """A README that says what the model is and how to use it.

        Args:
            grid: the name of a picture beside it.
            metadata: more arguments of :class:`huggingface_hub.ModelCardData`: license, datasets, tags, results.
            kwargs: more for the text: ``repo_id``; ``dataset``, what it was trained on; ``command``, which trained it;
                and ``results``, each with ``how`` the pictures were drawn and the ``numbers`` by name.
        """
        parameters = sum(p.numel() for p in self.network.parameters()) / 1e6
        module = None if type(self).__module__.startswith("rectified_flow.") else type(self).__module__
        return ModelCard.from_template(
            ModelCardData(library_name=LIBRARY, pipeline_tag=TASK, **(metadata or {})),
            template_str=MODEL_CARD,
            kind=type(self).__name__,
            loader="Flow" if module else type(self).__name__,
            module=module,
            noun=self.space.noun,
            shape=["b", *(self.space.shape or ())],
            classes=getattr(self.conditions.get("labels"), "num_classes", None),
            parameters=f"{parameters:.1f}",
            grid=grid,
            config=json.dumps(self.describe(), indent=1),
            **kwargs,
        )

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model to ``repo_id``, its card naming that; options are those of the hub's mixin."""
        card = {"repo_id": repo_id, **(options.pop("model_card_kwargs", None) or {})}
        return str(super().push_to_hub(repo_id, model_card_kwargs=card, **options))

    def _save_pretrained(self, save_directory: Path) -> None:
        description = self.describe()
        weights = checkpoint.own_weights(network_of(cast(nn.Module, self)))
        replace_file(save_directory / checkpoint.MODEL_FILE, checkpoint.to_bytes(weights))
        replace_file(save_directory / HUB_CONFIG, json.dumps(description, indent=1))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """The model of a folder or of the hub; options are those of ``hf_hub_download``.

        Raises:
            UsageError: if a file is damaged, or describes no flow of this class.
        """
        # Not by way of the hub's mixin, which reads the config without checking it.
        return cls._from_pretrained(model_id=str(pretrained_model_name_or_path), **options)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        folder = Path(model_id)
        if not folder.is_dir():
            fetch = partial(hf_hub_download, model_id, **options)
            fetch(checkpoint.MODEL_FILE)
            folder = Path(fetch(HUB_CONFIG)).parent
        flow = cls.from_description(checkpoint.load_document(folder, HUB_CONFIG), folder / HUB_CONFIG)
        checkpoint.load_weights(network_of(cast(nn.Module, flow)), folder, checkpoint.MODEL_FILE)
        return cast(Self, cast(nn.Module, flow).eval())
