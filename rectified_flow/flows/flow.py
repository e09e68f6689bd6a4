"""The contract of a flow, and the draws that all flows share: data, conditions and noise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.condition import Kinds, Labels, Values, drop
from rectified_flow.errors import UsageError
from rectified_flow.flows import Coupling
from rectified_flow.flows.couplings import CANDIDATES, nearest_candidate, optimal_pairs, squared_distances
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space

GPU_OPTIONS: dict[str, Any] = {
    # A value is computed wherever it is read, instead of being stored and read back.
    "realize_reads_threshold": 32,
    "realize_opcount_threshold": 300,
    "realize_acc_reads_threshold": 64,
    # Independent small kernels are launched as one. Most are casts of weights and of their gradients.
    "combo_kernels": True,
    "combo_kernels_pointwise_only": True,
    "combo_kernel_max_num_nodes": 16,
}
"""The compiler's options on a GPU, where launches and bytes bound a step: ``benchmarks/launches.py`` counts both."""


class Flow(nn.Module):
    """A module that holds a network; ``forward(**batch)`` is the loss, and ``sample`` generates data.

    Time is the noise level: ``x_t = (1 - t) x_0 + t noise``, so ``t = 0`` is data, ``t = 1`` is noise and the velocity
    along the way is ``noise - x_0``.

    A subclass draws a batch with :meth:`draw_batch`, its times with a time distribution, and returns ``self.loss(...)``
    of them: the objective, a function of every draw, which is what :meth:`compile` compiles. Entries of a batch that
    are neither data, nor a condition that the network takes, nor ``noise`` are ignored.

    Args:
        network: called ``network(x, t, **conditions)``; its attribute ``conditions`` maps the names of the conditions
            it takes to their kinds (:mod:`rectified_flow.condition`). Without one it takes none. Its method
            ``check_shape``, if it has one, raises a ValueError for a shape of ``x`` that it does not take.
        space: map between stored data and ``x``; :class:`Pixels` if not given.
        condition_dropout: probability of training a row without its conditions (Ho & Salimans 2022, arXiv:2207.12598).
        coupling: pairing of data and noise: ``independent``, or ``ot`` or ``immiscible`` for nearby pairs, see
            :mod:`rectified_flow.flows.couplings`.

    Raises:
        ValueError: if the network does not take data of the space's shape, or the conditions of the space, or
            ``condition_dropout`` is no probability.
    """

    sample: Callable[..., Tensor]
    """Function that generates data ``[b, ...]``, decoded by the space. Subclasses implement it."""
    velocity: Callable[..., Tensor]
    """The predicted velocity ``[b, ...]`` at ``(x, t, **conditions)``, for measuring."""
    loss: Callable[..., Any]
    """The objective: the loss as a function of every draw."""
    default_steps: ClassVar[int] = 16
    """Intervals of :meth:`sample` if a caller gives no number."""
    supports_bf16: bool = True
    """Whether the objective can be learned in bf16; if not, float32 on a GPU is not rounded to TF32 either."""

    def __init__(
        self,
        network: nn.Module,
        *,
        space: Space | None = None,
        condition_dropout: float = 0.0,
        coupling: Coupling = "independent",
    ) -> None:
        super().__init__()
        if not 0 <= condition_dropout <= 1:
            raise ValueError(f"condition_dropout is {condition_dropout}; it must be in [0, 1]")
        self.network = network
        self.space = space or Pixels()
        check_shape = getattr(network, "check_shape", None)
        if check_shape is not None and self.space.shape is not None:
            check_shape(self.space.shape)
        missing = [name for name in self.space.conditions if name not in self.conditions]
        if missing:
            raise ValueError(f"the network does not take the {missing[0]}: give it the conditions of the space")
        self.condition_dropout = condition_dropout
        self.coupling = coupling

    @property
    def conditions(self) -> Kinds:
        """The conditions that the network takes, by name."""
        return getattr(self.network, "conditions", {})

    @property
    def class_names(self) -> list[str]:
        """The names of the classes that can be sampled; empty if the network takes no labels."""
        labels = self.conditions.get("labels")
        if not isinstance(labels, Labels):
            return []
        return list(labels.names) or [str(label) for label in range(labels.num_classes)]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the objective; drawing stays outside, and no saved name changes.

        Args:
            args: positional arguments of :func:`torch.compile`.
            kwargs: keyword arguments of :func:`torch.compile`. By default, a flow on a GPU is compiled with the
                :data:`GPU_OPTIONS` that the installed PyTorch supports.
        """
        if self.device.type == "cuda" and not kwargs:
            known = torch._inductor.list_options()  # PyTorch 2.8 lacks two options, and refuses unknown ones
            kwargs["options"] = {name: value for name, value in GPU_OPTIONS.items() if name in known}
        self.loss = torch.compile(self.loss, *args, **kwargs)

    def draw_batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Values]:
        """Draw ``x_0``, noise and conditions of a training batch, augmented and dropped as training does.

        Args:
            batch: the data under ``space.key``, conditions by name, and optionally ``noise`` ``[b, ...]``, which
                belongs to the data (they are then not augmented), or ``noise_rows``, int64 ``[b]``, of :meth:`pair`.
        """
        if self.space.key not in batch:
            raise UsageError(
                f"a batch has {', '.join(batch)}, but not {self.space.key}, which the flow is trained on: rename the "
                "entry of the dataset's items"
            )
        data, paired = batch[self.space.key], "noise" in batch
        data, described = (data, {}) if paired else self.space.augment(data)
        x_0 = self.space.encode(data)
        self.space.shape = self.space.shape or tuple(x_0.shape[1:])
        conditions = {name: batch[name] for name in self.conditions if name in batch}
        noise = batch["noise"].float() if paired else self._draw_noise(x_0, conditions, batch)
        return x_0, noise, drop(self.conditions, conditions, self.condition_dropout) | described

    @property
    def pairs(self) -> bool:
        """Whether :meth:`pair` is to be called on each global batch before ``forward``."""
        return self.coupling == "ot"

    def pair(self, **batch: Any) -> Tensor:
        """Return the row of noise for each row of a global batch, int64 ``[b]``.

        To be called where all rows are present (see :mod:`rectified_flow.randomness`), before parts of them are given
        to ``forward``.
        """
        x_0 = self.space.encode(self.space.augment(batch[self.space.key])[0])
        conditions = {name: batch[name] for name in self.conditions if name in batch}
        noise = randomness.randn("noise", x_0.shape, x_0.device)
        return optimal_pairs(self.pairing_costs(x_0, noise, batch), _groups(conditions))

    def pairing_costs(self, x_0: Tensor, noise: Tensor, batch: dict[str, Any]) -> Tensor:
        """Return the costs ``[b, b]`` of pairing each datum with each row of noise, whose sum ``ot`` minimises."""
        return squared_distances(x_0, noise)

    def _draw_noise(self, x_0: Tensor, conditions: Values, batch: dict[str, Any]) -> Tensor:
        if self.coupling == "immiscible":
            drawn = (randomness.randn(f"noise {k}", x_0.shape, x_0.device) for k in range(CANDIDATES))
            return nearest_candidate(x_0, drawn)
        rows = batch.get("noise_rows")
        noise = randomness.randn("noise", x_0.shape, x_0.device, global_rows=rows)
        if self.coupling == "ot" and rows is None:  # no pairs of the global batch: pair this batch
            noise = noise[optimal_pairs(self.pairing_costs(x_0, noise, batch), _groups(conditions))]
        return noise

    def draw_start(
        self,
        count: int,
        conditions: Values,
        *,
        noise: Tensor | None = None,
        start: Tensor | None = None,
        noise_level: float = 1.0,
    ) -> tuple[Tensor, Values]:
        """Return the start of sampling and a value of every condition; those that are not given are drawn.

        Args:
            count: number of rows if no tensor is given.
            conditions: values by name.
            noise: standard normal ``[b, ...]``.
            start: data ``[b, ...]`` to start from, as the space stores them, with noise up to ``noise_level``.
            noise_level: the time to start at, with ``start``.

        Raises:
            ValueError: if the network does not take a condition, or the flow has not seen a shape yet.
        """
        unknown = [name for name in conditions if name not in self.conditions]
        if unknown:
            raise ValueError(f"the network does not take {', '.join(unknown)}, only {list(self.conditions)}")
        device = self.device
        count = next((len(given) for given in (start, noise, *conditions.values()) if given is not None), count)
        if noise is None:
            if self.space.shape is None:
                raise UsageError(
                    "the flow does not know the shape of its data yet: give noise, or a space with a shape"
                )
            noise = randomness.randn("sample noise", (count, *self.space.shape), device)
        values = {
            name: conditions[name].to(device) if name in conditions else kind.draw(name, count, device)
            for name, kind in self.conditions.items()
        }
        x = noise.float().to(device)
        if start is not None:
            x = torch.lerp(self.space.encode(start).to(device), x, noise_level)
        return x, values

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return _device_of(self)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the flow into evaluation mode inside the block."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def network_of(flow: nn.Module) -> nn.Module:
    """Return the module whose weights a checkpoint keeps: the flow's network, or a flow with weights outside of it."""
    network = getattr(flow, "network", None)
    if isinstance(network, nn.Module) and len(network.state_dict()) == len(flow.state_dict()):
        return network
    return flow


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def expand(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t`` ``[b]`` with trailing sides of 1, to multiply ``x`` ``[b, ...]``."""
    return t.reshape(-1, *[1] * (x.ndim - 1))


def _groups(conditions: Values) -> Tensor | None:
    """Return numbers ``[b]`` that are equal for rows with equal conditions; None without conditions."""
    if not conditions:
        return None
    columns = torch.cat([values.reshape(len(values), -1).double() for values in conditions.values()], dim=1)
    return columns.nan_to_num(nan=1e300).unique(dim=0, return_inverse=True)[1]


def sample_batches(
    flow: Flow,
    numbers: Sequence[int],
    *,
    seed: int = 0,
    batch_size: int = 64,
    conditions: Mapping[str, Tensor] | None = None,
    start: Tensor | None = None,
    with_alpha: bool = False,
    **options: Any,
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Generate samples, and yield their numbers and pictures, uint8 ``[b, 3, h, w]``, a batch at a time.

    Args:
        flow: the flow to sample from, or another module with the method ``sample`` of a flow.
        numbers: numbers of the samples to generate.
        seed: seed of all samples.
        batch_size: largest number of samples in a batch.
        conditions: sample ``i`` has row ``i % n`` of each of these ``[n, ...]``; one that is left out is drawn.
        start: sample ``i`` starts from row ``i % n`` of these data ``[n, ...]``.
        with_alpha: yield RGBA ``[b, 4, h, w]`` for pictures with transparency, instead of RGB over white.
        options: further arguments of ``flow.sample``.
    """
    space = getattr(flow, "space", None) or Pixels()
    to_picture = space.render_with_alpha if with_alpha else space.render
    rows = {**(conditions or {}), **({} if start is None else {"start": start})}
    for first in range(0, len(numbers), batch_size):
        some = numbers[first : first + batch_size]
        given = {name: values[[number % len(values) for number in some]] for name, values in rows.items()}
        with deterministic(Samples(seed, some), _device_of(flow)):
            yield some, to_picture(flow.sample(len(some), **given, **options))
