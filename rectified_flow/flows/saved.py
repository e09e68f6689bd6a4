"""Flows that come back from a checkpoint, a folder or the Hugging Face hub, with nothing to repeat."""

import json
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
from torch import nn

from rectified_flow import checkpoint
from rectified_flow.errors import UsageError
from rectified_flow.flows.timesteps import LogitNormal, Uniform, UShaped
from rectified_flow.networks import Unet

FLOW_FILE = "flow.json"
HUB_CONFIG = "config.json"

NETWORKS = {"Unet": Unet}
TIME_DISTRIBUTIONS = {each.__name__: each for each in (LogitNormal, Uniform, UShaped)}

MODEL_CARD = """---
{{ card_data }}
---

# {{ title | default("A " + kind, true) }}

{{ kind }} of {{ side }} px images{% if classes %} in {{ classes }} classes{% endif %}, {{ parameters }} M parameters.
{% if grid %}
![samples]({{ grid }})
{% endif %}
```python
from rectified_flow import {{ kind }}

flow = {{ kind }}.from_pretrained({{ repo_id | default("this folder", true) | tojson }})
images = flow.sample(16)  # float32 [16, 3, {{ side }}, {{ side }}] in [0, 1]
```

```json
{{ config }}
```
"""


class Saved(ModelHubMixin):
    """What a flow needs to be built again: its class, its network's settings and its own.

    A network takes part if it is one of ``NETWORKS`` and keeps its settings in ``config``.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that are arguments of ``__init__``."""
    network: nn.Module

    def describe(self) -> dict[str, Any] | None:
        """All it takes to build this flow again, as JSON can hold it; None if it has parts that are not known here."""
        if not isinstance(self.network, tuple(NETWORKS.values())):
            return None
        description: dict[str, Any] = {
            "flow": type(self).__name__,
            "network": {"kind": type(self.network).__name__, **cast(Any, self.network).config},
        }
        for name in self.settings:
            value: Any = getattr(self, name)
            if isinstance(value, tuple(TIME_DISTRIBUTIONS.values())):
                value = {"kind": type(value).__name__, **asdict(cast(Any, value))}
            elif not isinstance(value, bool | int | float | str | list | tuple | None):
                return None
            description[name] = value
        return description

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Self:
        """Build the flow that ``describe`` told of, with fresh weights.

        Raises:
            UsageError: if it is of another class than this, or does not describe a flow.
        """
        try:
            settings = deepcopy(description)
            kind, network = settings.pop("flow"), settings.pop("network")
            known = {each.__name__: each for each in _family(cls)}
            if kind not in known:
                raise UsageError(f"the model is a {kind}, not a {cls.__name__}")
            for name, value in settings.items():
                if isinstance(value, dict):
                    settings[name] = TIME_DISTRIBUTIONS[value.pop("kind")](**value)
            build: Any = known[kind]
            return cast(Self, build(NETWORKS[network.pop("kind")](**network), **settings))
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"the description of the model is not one that this version knows ({error!r})") from error

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Self:
        """The flow of a checkpoint, or of a run's newest, with averaged weights if there are any; ready to sample.

        Raises:
            UsageError: if there is none, it is damaged, or does not say how to build its flow.
        """
        path = checkpoint.resolve(Path(path))
        if not (path / FLOW_FILE).exists():
            raise UsageError(
                f"checkpoint {path} has no {FLOW_FILE}, so its flow must be built by hand: see "
                "rectified_flow.checkpoint.load_network"
            )
        flow = cls.from_description(checkpoint.load_document(path, FLOW_FILE))
        checkpoint.load_weights(flow.network, path, checkpoint.averaged_weights(path))
        return cast(Self, cast(nn.Module, flow).eval())

    def generate_model_card(self, *, grid: str | None = None, **kwargs: Any) -> ModelCard:
        """A README with what the model is and how to use it; ``grid`` names a picture beside it."""
        description = self.describe() or {}
        parameters = sum(p.numel() for p in self.network.parameters()) / 1e6
        return ModelCard.from_template(
            ModelCardData(library_name="rectified-flow", pipeline_tag="unconditional-image-generation"),
            template_str=MODEL_CARD,
            kind=type(self).__name__,
            side=(description.get("image_shape") or [0])[-1],
            classes=description.get("network", {}).get("num_classes"),
            parameters=f"{parameters:.1f}",
            grid=grid,
            config=json.dumps(description, indent=1),
            **kwargs,
        )

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model to ``repo_id``, its card naming that; options are those of the hub's mixin."""
        card = {"repo_id": repo_id, **(options.pop("model_card_kwargs", None) or {})}
        return str(super().push_to_hub(repo_id, model_card_kwargs=card, **options))

    def _save_pretrained(self, save_directory: Path) -> None:
        description = self.describe()
        if description is None:
            raise UsageError(f"a {type(self.network).__name__} cannot be described, so it cannot be built again")
        (save_directory / HUB_CONFIG).write_text(json.dumps(description, indent=1))
        checkpoint.save_tensors(self.network.state_dict(), save_directory / checkpoint.MODEL_FILE)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        folder = Path(model_id)
        if not folder.is_dir():
            wanted = ("revision", "cache_dir", "force_download", "token", "local_files_only")
            fetch = partial(hf_hub_download, model_id, **{name: options.get(name) for name in wanted})
            fetch(checkpoint.MODEL_FILE)
            folder = Path(fetch(HUB_CONFIG)).parent
        flow = cls.from_description(checkpoint.load_document(folder, HUB_CONFIG))
        checkpoint.load_weights(flow.network, folder, checkpoint.MODEL_FILE)
        return cast(Self, cast(nn.Module, flow).eval())


def _family(cls: type[Saved]) -> list[type[Saved]]:
    return [cls, *(each for child in cls.__subclasses__() for each in _family(child))]
