"""What all flows share: how images, labels and noise enter, and in which state sampling happens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.flows.couplings import CANDIDATES, Coupling, nearest_candidate, optimal_transport
from rectified_flow.flows.images import random_horizontal_flip, to_signed
from rectified_flow.flows.saved import Saved


class Flow(nn.Module, Saved):
    """A module that holds a network, whose ``forward(images, labels)`` is the loss and which can ``sample``.

    Time is the noise level: ``x_t = (1 - t) x_0 + t noise``, so ``t = 0`` is data, ``t = 1`` is noise and the velocity
    along the way is ``noise - x_0``.

    Args:
        network: called ``network(x, t, ...)``; it gets labels if it has ``num_classes``.
        label_dropout: probability of training a row without its label (Ho & Salimans 2022, arXiv:2207.12598).
        horizontal_flip: mirror half of the training images.
        image_shape: ``(c, h, w)`` to sample; remembered from the first training batch if not given.
        class_names: names by label.
        coupling: which noise each image is trained with: its own, or by ``ot`` or ``immiscible`` one that is near, see
            :mod:`rectified_flow.flows.couplings`.
    """

    settings: ClassVar[tuple[str, ...]] = ("label_dropout", "horizontal_flip", "image_shape", "class_names", "coupling")

    sample: Callable[..., Tensor]
    """Generates images, float32 ``[b, c, h, w]`` in [0, 1]; each flow in its own way."""
    default_steps: ClassVar[int]
    """Intervals of :meth:`sample` unless told otherwise."""

    def __init__(
        self,
        network: nn.Module,
        *,
        label_dropout: float = 0.0,
        horizontal_flip: bool = False,
        image_shape: Sequence[int] | None = None,
        class_names: Sequence[str] = (),
        coupling: Coupling = "independent",
    ) -> None:
        super().__init__()
        self.network = network
        self.num_classes: int | None = getattr(network, "num_classes", None)
        self.label_dropout = label_dropout
        self.horizontal_flip = horizontal_flip
        self.image_shape = None if image_shape is None else tuple(image_shape)
        self.class_names = list(class_names)
        self.coupling = coupling

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the objective in place, its draws left outside; no saved name changes."""
        self.objective = torch.compile(self.objective, *args, **kwargs)  # type: ignore[has-type]

    def _call(self, x: Tensor, t: Tensor, labels: Tensor | None, **conditions: Tensor) -> Tensor:
        """The network's output in float32; labels only where it has classes."""
        if self.num_classes is not None:
            return self.network(x, t, labels=labels, **conditions).float()
        return self.network(x, t, **conditions).float()

    @property
    def pairs(self) -> bool:
        """Whether :meth:`pair` is to be called before ``forward``."""
        return self.coupling == "ot"

    def pair(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """The row of noise that each row of a global batch gets, int64 ``[b]``.

        To be called where all rows are present (see :mod:`rectified_flow.randomness`), before parts of them are given
        to ``forward``.
        """
        x_0 = self._draw_data(images)
        return self._transport(x_0, randomness.randn("noise", x_0.shape, x_0.device), labels)

    def _draw_batch(
        self, images: Tensor, labels: Tensor | None, noise_rows: Tensor | None, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Data in [-1, 1], noise, and the labels to train on; images that come with their noise are not mirrored."""
        x_0 = self._draw_data(images) if noise is None else to_signed(images)
        self.image_shape = self.image_shape or tuple(x_0.shape[1:])
        if noise is not None:
            noise = noise.float()
        elif self.coupling == "immiscible":
            drawn = (randomness.randn(f"noise {k}", x_0.shape, x_0.device) for k in range(CANDIDATES))
            noise = nearest_candidate(x_0, drawn)
        else:
            noise = randomness.randn("noise", x_0.shape, x_0.device, instead=noise_rows)
            if self.coupling == "ot" and noise_rows is None:  # nobody paired the global batch: pair what is here
                noise = noise[self._transport(x_0, noise, labels)]
        return x_0, noise, self._drop_labels(labels)

    def _transport(self, x_0: Tensor, noise: Tensor, labels: Tensor | None) -> Tensor:
        return optimal_transport(x_0, noise, labels if self.num_classes is not None else None)

    def _draw_data(self, images: Tensor) -> Tensor:
        x_0 = to_signed(images)
        return random_horizontal_flip(x_0) if self.horizontal_flip else x_0

    def _drop_labels(self, labels: Tensor | None) -> Tensor | None:
        if labels is None or self.num_classes is None or self.label_dropout == 0:
            return labels
        dropped = randomness.rand("label dropout", labels.shape, labels.device) < self.label_dropout
        return labels.masked_fill(dropped, self.num_classes)

    def _draw_start(
        self,
        batch_size: int,
        labels: Tensor | None,
        noise: Tensor | None,
        generator: torch.Generator | None,
        images: Tensor | None = None,
        noise_level: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:
        """What to start sampling from, noise or noisy images, and labels: what was given, the rest drawn."""
        device = next(self.network.parameters()).device
        count = next((len(given) for given in (images, noise, labels) if given is not None), batch_size)
        if noise is None:
            noise = self._draw_noise(count, device, generator)
        if labels is None and self.num_classes is not None:
            labels = _draw_labels(self.num_classes, count, device, generator)
        x = noise.float().to(device)
        labels = None if labels is None else labels.to(device)
        if images is not None:
            x = torch.lerp(to_signed(images).to(device), x, noise_level)
        return x, labels

    def _draw_noise(self, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        if self.image_shape is None:
            raise ValueError("the flow does not know its image shape yet: give noise, or image_shape when building it")
        shape = (count, *self.image_shape)
        if generator is not None:
            return torch.randn(shape, device=device, generator=generator)
        return randomness.randn("sample noise", shape, device)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def expand(t: Tensor, x: Tensor) -> Tensor:
    """``t`` ``[b]`` with trailing ones, to multiply ``x`` ``[b, ...]``."""
    return t.reshape(-1, *[1] * (x.ndim - 1))


def _draw_labels(num_classes: int, count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    if generator is not None:
        return torch.randint(num_classes, (count,), device=device, generator=generator)
    return randomness.randint("sample labels", num_classes, (count,), device)
