"""Conditions: named inputs of a network beside ``x`` and the time, each with a value that stands for "none".

A network has an attribute ``conditions``, a mapping of names to kinds, and so has a dataset. Dropping conditions in
training and guidance in sampling are the same for all kinds.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.errors import UsageError
from rectified_flow.registry import Document, register

if TYPE_CHECKING:
    from accelerate import PartialState

    from rectified_flow.exportable import Exportable


class Condition(ABC):
    """A kind of condition. Register it and keep its arguments as attributes, and checkpoints can name it."""

    @abstractmethod
    def none(self, count: int, device: torch.device) -> Tensor:
        """Return ``count`` rows that stand for "no condition"."""

    def none_like(self, values: Tensor) -> Tensor:
        """Return rows that stand for "no condition" in place of ``values``."""
        return self.none(len(values), values.device).to(values.dtype)

    def is_none(self, values: Tensor) -> Tensor:
        """Return whether each row stands for "no condition", bool ``[b]``."""
        none = self.none_like(values)
        same = (values == none) | (values.isnan() & none.isnan())
        return same.reshape(len(values), -1).all(dim=1)

    def check(self, name: str, values: Tensor) -> str:
        """Return a warning about the values ``[b, ...]`` of the condition ``name``; empty if there is no problem.

        Raises:
            UsageError: if a value is invalid, such as a label that is out of range.
        """
        return ""

    def draw(self, name: str, count: int, device: torch.device) -> Tensor:
        """Draw ``count`` values for samples whose caller gives none; by default "none" for every row.

        Random draws come from :mod:`rectified_flow.randomness`, from a stream that ``name``, the name of the condition,
        selects, so that a sample does not depend on its batch.
        """
        return self.none(count, device)

    @abstractmethod
    def embedding(self, dim: int) -> nn.Module:
        """Return a module that embeds values ``[b, ...]``, also "none", as ``[b, dim]``."""

    def sequence_embedding(self, dim: int) -> nn.Module | None:
        """Return a module for values that are also a sequence, such as the words of a caption; else None.

        A network attends to the sequence. The module returns the embedding ``[b, n, dim]`` and its mask, bool
        ``[b, n]``: false for padding, and for all of "none".
        """
        return None


class StoredValues(Protocol):
    """The values of a column, read by their numbers."""

    def __getitem__(self, numbers: list[int], /) -> Tensor:
        """Return the values ``[n, ...]`` of some numbers."""


class WrittenCondition(Condition):
    """A kind of condition whose values a user can write, for example in a column of metadata.

    Register a subclass, and ``COLUMN=NAME`` in the flag ``condition_on`` trains on a column as this kind.
    """

    column_type: ClassVar[str]
    """Name of the kind for the flag ``condition_on``."""
    is_text: ClassVar[bool] = False
    """Whether values are free texts, which suit any column, and are stored in half precision by a teacher."""

    @property
    def examples(self) -> tuple[str, ...]:
        """Values to start from."""
        return ()

    @classmethod
    def suits(cls, texts: Sequence[str]) -> bool:
        """Return whether a column with these texts is taken for this kind, if a user names none."""
        return False

    @classmethod
    def normal(cls, text: str) -> str | None:
        """Return a text of a column in the form that :meth:`parse` takes; None if missing, a ValueError if no value."""
        return text

    @classmethod
    @abstractmethod
    def fit(cls, texts: Sequence[str], *, text_encoder: str | None = None, text_tokens: int = 0) -> Self:
        """Return the condition of a column with these texts.

        Args:
            texts: the texts.
            text_encoder: folder or hub id of the encoder of captions; None for a bag of words.
            text_tokens: number of tokens of a caption that a network attends to.
        """

    def split(self, text: str) -> list[str]:
        """Return the values in the text of a flag, separated by semicolons or else by commas."""
        return [each.strip() for each in text.split(";" if ";" in text else ",")]

    @abstractmethod
    def parse(self, texts: Sequence[str]) -> Tensor:
        """Return the values ``[n, ...]`` of texts."""

    def stored(self, texts: Sequence[str], folder: Path, state: "PartialState") -> "StoredValues":
        """Return the values of a column, indexed by a list of numbers; ``folder`` keeps encoded values. Collective."""
        return self.parse(texts)

    def targets(self, values: Tensor) -> Tensor | None:
        """Return numbers ``[n, k]`` that a regression on pictures predicts to judge samples, one-hot if ``k > 1``."""
        return None

    def scores(self, values: Tensor, pictures: Tensor) -> dict[str, float]:
        """Return further scores of how well samples suit their values ``[n, ...]``.

        ``pictures`` are the features ``[1 + v, n, d]`` of the real pictures and of their samples.
        """
        return {}

    def exported(self) -> Document:
        """Return what a caller of an exported program needs to know to choose values."""
        raise UsageError(f"a {self.column_type} cannot be exported: train without this condition")

    def companion(self) -> "Exportable | None":
        """Return a module that callers of an exported program need as a further program, if there is one."""
        return None


ConditionSpecs = Mapping[str, Condition]
Values = dict[str, Tensor]
MAX_LABELS, ROWS_PER_LABEL = 1000, 5
"""Largest number of labels, and smallest average number of rows per label, in a column of labels."""


@register
@dataclass(frozen=True)
class Labels(WrittenCondition):
    """Class labels, int64 ``[b]``; the label ``num_classes`` stands for "none".

    Args:
        num_classes: number of classes.
        names: names by label, or empty.
    """

    column_type: ClassVar[str] = "label"
    num_classes: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) not in (0, self.num_classes):
            raise ValueError(f"there are {len(self.names)} names for {self.num_classes} classes")

    @property
    @override
    def examples(self) -> tuple[str, ...]:
        return self.names or tuple(map(str, range(self.num_classes)))

    @override
    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), self.num_classes, device=device)

    @override
    def check(self, name: str, values: Tensor) -> str:
        low, high = map(int, values.aminmax())
        known = f"`Labels({self.num_classes})` takes 0 to {self.num_classes - 1}"
        if low < 0 or high > self.num_classes:
            found = f"reach {high}" if low >= 0 else f"begin at {low}"
            raise UsageError(f"{name} {found}, and {known}: number the classes from 0, or give `Labels` more classes")
        # The condition of a column has another name, and its missing values have this label. A small batch may lack
        # the label 0 by chance.
        if name != "labels" or low == 0 or high < self.num_classes or values.numel() < 4 * self.num_classes:
            return ""
        return f"{name} reach {high}, which means no label, as {known}: number the classes from 0 if {high} is a class"

    @classmethod
    @override
    def suits(cls, texts: Sequence[str]) -> bool:
        few = len(set(texts)) <= min(MAX_LABELS, max(2, len(texts) // ROWS_PER_LABEL))
        return few and not Number.suits(texts)

    @classmethod
    @override
    def fit(cls, texts: Sequence[str], **options: object) -> Self:
        names = sorted(set(texts))
        return cls(len(names), tuple(names))

    @override
    def draw(self, name: str, count: int, device: torch.device) -> Tensor:
        return randomness.randint(f"sample {name}", self.num_classes, (count,), device)

    @override
    def split(self, text: str) -> list[str]:
        if text in self.examples:
            return [text]
        return [*self.examples] if text.strip() == "all" else super().split(text)

    @override
    def parse(self, texts: Sequence[str]) -> Tensor:
        names = self.examples
        # If all names are numbers, the number of a class could be the name of another.
        numbers = {} if all(map(NUMBER.fullmatch, names)) else {str(label): label for label in range(self.num_classes)}
        folded = Counter(map(str.casefold, names))  # names that differ in case only are read as they are written
        alike = {name.casefold(): label for label, name in enumerate(names) if folded[name.casefold()] == 1}
        exact = numbers | {name: label for label, name in enumerate(names)}
        found = [exact.get(text, alike.get(text.casefold())) for text in texts]
        for text, label in zip(texts, found, strict=True):
            if label is None:
                like = f"names like {', '.join(names[:3])}" + f", or numbers up to {len(names) - 1}" * bool(numbers)
                raise UsageError(f"{text} does not exist: pass {like}")
        return torch.tensor(found)

    @override
    def targets(self, values: Tensor) -> Tensor:
        return F.one_hot(values, self.num_classes + 1).double()

    @override
    def exported(self) -> Document:
        return {"kind": "label", "names": list(self.examples), "none": self.num_classes}

    @override
    def embedding(self, dim: int) -> nn.Module:
        return nn.Embedding(self.num_classes + 1, dim)


LARGEST = 1e30  # number from which on a number counts as "none", as NaN does: exported programs pass it in place of NaN
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
DECIMAL = re.compile(r"[-+\u2212]?\d+[.,]?\d*", re.ASCII)
GROUPED = re.compile(r"[-+\u2212]?[1-9]\d{0,2}((,\d{3})+(\.\d+)?|(\.\d{3})+,\d+|([' \xa0\u202f]\d{3})+([.,]\d+)?)")
"""Numbers with groups of digits; the comma of 1,234 may also be a decimal comma."""
POINTED = re.compile(r"[-+\u2212]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
"""A number with points between groups of digits, or three digits behind a decimal point."""
MEASURED = re.compile(
    r"(?P<before>[$\u20ac\u00a3\u00a5])?\s*(?P<number>[-+\u2212]?\d+(?:[.,]\d+)?)\s*(?P<unit>[^\W\d_]+|[%\u00b0][CF]?)?"
)
"""A number with a unit."""
MISSING = {"-", ".", "?", "na", "n/a", "n.a.", "nan", "null", "none", "<na>", "#n/a", "#div/0!", "\u2013", "\u2014"}
"""Texts that stand for no value in a column of numbers, in lower case."""
NUMERIC = 0.9  # smallest share of numbers among the known values of a column of numbers
QUANTILES = 33  # number of quantiles that are kept of a column of numbers
FREQUENCIES = 4


@register
@dataclass(frozen=True)
class Number(WrittenCondition):
    """Numbers, float32 ``[b]``; NaN stands for "none".

    The network gets the quantile rank of a number in the training data. Numbers outside of the training range are
    clamped to it. ``quantiles`` ascend from the minimum to the maximum of the training
    data, at equally spaced ranks.
    """

    column_type: ClassVar[str] = "number"
    quantiles: tuple[float, ...]

    @property
    @override
    def examples(self) -> tuple[str, ...]:
        quarters = self.quantiles[:: len(self.quantiles) // 4 or 1]
        return tuple(f"{value:.9g}" for value in dict.fromkeys(quarters))

    @override
    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), torch.nan, device=device)

    @classmethod
    @override
    def suits(cls, texts: Sequence[str]) -> bool:
        known = [text for text in texts if text.lower() not in MISSING]
        numeric = [text for text in known if GROUPED.fullmatch(text) or as_number(with_point(text)) is not None]
        return len(numeric) >= NUMERIC * len(known)

    @classmethod
    @override
    def normal(cls, text: str) -> str | None:
        if text.lower() in MISSING:
            return None
        if GROUPED.fullmatch(text) or as_number(with_point(text)) is None:
            raise ValueError(text)
        return with_point(text)

    @classmethod
    @override
    def fit(cls, texts: Sequence[str], **options: object) -> Self:
        numbers = np.array([as_number(text) for text in texts])
        return cls(tuple(np.quantile(numbers, np.linspace(0, 1, QUANTILES)).astype(np.float32).tolist()))

    @override
    def draw(self, name: str, count: int, device: torch.device) -> Tensor:
        share = randomness.rand(f"sample {name}", (count,), device) * (len(self.quantiles) - 1)
        low, table = share.long(), torch.tensor(self.quantiles, device=device)
        return torch.lerp(table[low], table[low + 1], share - low)

    @override
    def split(self, text: str) -> list[str]:
        """Return the numbers as written, and warn of those outside of the training range."""
        from tqdm.auto import tqdm  # takes long to load

        texts, low, high = super().split(text), self.quantiles[0], self.quantiles[-1]
        for number in map(as_number, texts):
            if number is not None and not low <= number <= high:
                tqdm.write(f"warning: {number:g} is clamped to the training range {low:g} to {high:g}")
        return texts

    @override
    def parse(self, texts: Sequence[str]) -> Tensor:
        values = [as_number(text) for text in texts]
        if None in values:
            text = texts[values.index(None)]
            _, unit = without_unit([text])
            raise UsageError(f"{text} is not a number" + f": pass it without its unit {unit}" * bool(unit))
        return torch.tensor(values)

    @override
    def targets(self, values: Tensor) -> Tensor:
        shares = np.linspace(0, 1, len(self.quantiles))
        return torch.from_numpy(np.interp(values, self.quantiles, shares))[:, None]

    @override
    def exported(self) -> Document:
        return {"kind": "number", "quantiles": list(self.quantiles)}

    @override
    def embedding(self, dim: int) -> nn.Module:
        return _NumberEmbedding(self.quantiles, dim)


def as_number(text: str) -> float | None:
    """Return a number as written; None if it is none, or its magnitude is :data:`LARGEST` or more."""
    # float() also takes 1_2, and the digits of other scripts
    number = float(text) if NUMBER.fullmatch(text.strip()) else LARGEST
    return number if abs(number) < LARGEST else None


def with_point(text: str) -> str:
    """Return a number with a point in place of a decimal comma, and the minus of a keyboard."""
    return text.replace(",", ".").replace("\u2212", "-") if DECIMAL.fullmatch(text) else text


def with_points(texts: Sequence[str]) -> list[str]:
    """Return the texts of a column with decimal points in place of decimal commas.

    If any number has a decimal comma, points as in 1.200 are removed, as they are thousands separators.
    """
    has_commas = any("," in text and (DECIMAL.fullmatch(text) or POINTED.fullmatch(text)) for text in texts)
    return [with_point(text.replace(".", "") if has_commas and POINTED.fullmatch(text) else text) for text in texts]


def without_unit(texts: Sequence[str]) -> tuple[list[str], str]:
    """Return texts without the unit that follows or precedes the number in each of them, and the unit.

    The texts are returned unchanged, with an empty unit, unless all texts but the missing ones have the same unit.
    """
    known = [text for text in texts if text.lower() not in MISSING]
    found = [MEASURED.fullmatch(text) for text in known]
    units = {(match["before"] or "") + (match["unit"] or "") if match else "" for match in found}
    if len(units) != 1 or "" in units:
        return list(texts), ""
    numbers = (MEASURED.fullmatch(text) if text.lower() not in MISSING else None for text in texts)
    without = [text if match is None else match["number"] for text, match in zip(texts, numbers, strict=True)]
    return without, units.pop()


class _NumberEmbedding(nn.Module):
    """A linear embedding of the quantile rank of a number and its Fourier features, and a learned one of "none"."""

    low: Tensor
    width: Tensor

    def __init__(self, quantiles: Sequence[float], dim: int) -> None:
        super().__init__()
        table = torch.tensor(quantiles, dtype=torch.float32)
        # Not persistent: the quantiles come from the data, so that --init_from does not overwrite them.
        self.register_buffer("low", table[:-1].clone(), persistent=False)
        self.register_buffer("width", table.diff().clamp(min=torch.finfo(torch.float32).tiny), persistent=False)
        self.linear = nn.Linear(1 + 2 * FREQUENCIES, dim)
        self.none = nn.Parameter(torch.zeros(dim))

    def forward(self, values: Tensor) -> Tensor:
        with torch.autocast(values.device.type, enabled=False):
            known = (values.abs() < LARGEST)[:, None]
            numbers = torch.where(known, values.float()[:, None], self.low[:1])
            share = ((numbers - self.low) / self.width).clamp(0, 1).mean(dim=1, keepdim=True)
            angles = torch.pi * share * 2.0 ** torch.arange(FREQUENCIES, device=values.device)
            features = torch.cat((2 * share - 1, angles.cos(), angles.sin()), dim=1)
            return torch.where(known, self.linear(features), self.none)


@register
@dataclass(frozen=True)
class AugmentationLabels(Condition):
    """Numbers, float32 ``[b, size]``, that describe the augmentation of a row; zeros for none.

    The data space gives them in training, and sampling sets them to zero. They are neither dropped nor guided by.
    """

    size: int

    @override
    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.zeros(count, self.size, device=device)

    @override
    def none_like(self, values: Tensor) -> Tensor:
        return values  # never dropped: the network would learn the variants as if they were data

    @override
    def embedding(self, dim: int) -> nn.Module:
        return nn.Linear(self.size, dim, bias=False)


@register
@dataclass(frozen=True)
class Picture(Condition):
    """Pictures of the shape of ``x``, float32 ``[b, c, h, w]``; missing pixels are NaN, and "none" is NaN alone.

    A :class:`Unet <rectified_flow.networks.unet.Unet>` adds the embedding ``[b, dim, h, w]`` to its first layer. The
    embedding also takes pictures with the map of their unknown pixels, see :func:`with_map`.

    Args:
        shape: ``(c, h, w)``.
    """

    shape: tuple[int, ...]

    @override
    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count, *self.shape), torch.nan, device=device)

    @override
    def none_like(self, values: Tensor) -> Tensor:
        return torch.full_like(values, torch.nan)

    @override
    def embedding(self, dim: int) -> nn.Module:
        return _PictureEmbedding(self.shape[0], dim)


class _PictureEmbedding(nn.Module):
    """A convolution of the known pixels and of the map of unknown ones, which adds nothing before training."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels + 1, dim, 3, padding=1)
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]

    def forward(self, values: Tensor) -> Tensor:
        """Embed pictures ``[b, c, h, w]`` with NaN, or ``[b, c + 1, h, w]`` of :func:`with_map`."""
        return self.conv(values if values.shape[1] == self.conv.in_channels else with_map(values))


def with_map(values: Tensor) -> Tensor:
    """Return pictures ``[b, c + 1, h, w]`` without NaN: unknown pixels are 0, and 1 in the last channel, their map.

    Exported programs take pictures in this form, as graphics cards do not handle NaN reliably.
    """
    unknown = values.isnan()
    return torch.cat((values.masked_fill(unknown, 0), unknown.any(dim=1, keepdim=True)), dim=1)


def chosen(kinds: ConditionSpecs) -> ConditionSpecs:
    """Return the conditions that sampling chooses and guides by: all but :class:`AugmentationLabels`."""
    return {name: kind for name, kind in kinds.items() if not isinstance(kind, AugmentationLabels)}


def written(kinds: ConditionSpecs) -> dict[str, WrittenCondition]:
    """Return the conditions whose values a user can write."""
    return {name: kind for name, kind in kinds.items() if isinstance(kind, WrittenCondition)}


def read_written(kinds: ConditionSpecs, texts: Mapping[str, Sequence[str | None]]) -> Values:
    """Return the values of texts by name: "none" for conditions without a text, and nothing if there are no texts."""
    values = {}
    for name, kind in written(kinds).items() if texts else ():
        given = [text for text in texts.get(name, ()) if text is not None]
        values[name] = kind.parse(given) if given else kind.none(1, torch.device("cpu"))
    return values


def example_texts(kinds: ConditionSpecs) -> dict[str, list[str]]:
    """Return texts to sample with where a user writes no conditions: the examples of captions."""
    return {name: [*kind.examples] for name, kind in written(kinds).items() if kind.is_text and kind.examples}


def check_values(kinds: ConditionSpecs, batch: Mapping[str, object]) -> list[str]:
    """Return warnings about the conditions in a batch. Only values on the CPU are checked, to avoid a synchronisation.

    Raises:
        UsageError: if a value is invalid, such as a label that is out of range.
    """
    given = {name: batch.get(name) for name in kinds}
    there = {name: values for name, values in given.items() if isinstance(values, Tensor) and values.is_cpu}
    remarks = (kinds[name].check(name, values) for name, values in there.items() if values.numel())
    return [remark for remark in remarks if remark]


def drop(kinds: ConditionSpecs, values: Values, probability: float) -> Values:
    """Replace all conditions of a row by "none" with ``probability`` (Ho & Salimans 2022, arXiv:2207.12598).

    If there are several conditions and at least one comes from a column, each condition is also replaced on its own
    with ``probability``, so that sampling can use any subset.
    """
    if not values or probability == 0:
        return values
    first = next(iter(values.values()))
    # The stream is named after labels, which were once the only condition. Renaming it would change every run.
    every = randomness.rand("label dropout", (len(first),), first.device) < probability
    free = chosen(kinds).keys() & values.keys()
    separate = len(free) > 1 and bool((free - {"labels"}) & written(kinds).keys())

    def dropped(name: str) -> Tensor:
        if not separate:
            return every
        return every | (randomness.rand(f"dropout of {name}", (len(first),), first.device) < probability)

    return {
        name: torch.where(dropped(name).reshape(-1, *[1] * (none.ndim - 1)), none.to(values[name]), values[name])
        for name, none in none_of(kinds, values).items()
    }


def none_of(kinds: ConditionSpecs, values: Values) -> Values:
    """Replace the values of each condition by "none", except for :class:`AugmentationLabels`, which stay."""
    return {name: kinds[name].none_like(each) for name, each in values.items()}


def all_none(kinds: ConditionSpecs, values: Values) -> Tensor:
    """Return whether each row has none of the conditions that can be chosen, bool ``[b]``."""
    return torch.stack([kinds[name].is_none(each) for name, each in values.items()]).all(dim=0)
