"""Tests of the agreement with conditions, on features whose scores are known."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import PartialState
from sklearn.linear_model import RidgeCV
from torch import Tensor

from rectified_flow.condition import Labels, Number, Values
from rectified_flow.evaluation.evaluator import Comparison, Evaluator
from rectified_flow.evaluation.scores import PENALTIES, agreement, ridge
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords

COUNT, WIDTH = 400, 20
LABELS, NUMBER = Labels(4), Number(tuple(range(11)))
CAPTION = Caption(BagOfWords([str(word) for word in range(COUNT)]), COUNT)
both = pytest.mark.parametrize("holds_out", [False, True])


class Rows:
    """Data that have conditions only."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def condition_values(self, numbers: Sequence[int]) -> Values:
        return {name: each[list(numbers)] for name, each in self.values.items()}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def score(
    kind: Any,
    values: Tensor,
    real: Tensor,
    sample: Callable[[Tensor], Tensor],
    *,
    holds_out: bool,
    num_samples: int = 300,
) -> dict[str, float]:
    """Score samples with the features ``sample(rows)`` on data with these values and features, half of it held out."""
    split = len(values) // 2 if holds_out else len(values)
    training, others = Rows({"it": values[:split]}), Rows({"it": values[split:]})
    evaluator: Any = SimpleNamespace(
        dataset=training, held_out=others if holds_out else None, num_samples=num_samples, seed=0, state=PartialState()
    )
    evaluator.real = SimpleNamespace(features=[real[:split]], held_out=real[split:] if holds_out else None)
    evaluator.order = partial(Evaluator.order, evaluator)
    order = torch.tensor(evaluator.order(others if holds_out else training, num_samples))
    rows = order[torch.arange(num_samples) % len(order)] + (split if holds_out else 0)

    def sample_features(flow: object, numbers: Sequence[int], *, conditions: Values, steps: int) -> Tensor:
        assert steps == 3
        chosen = rows[list(numbers)]
        given = conditions["it"][[number % len(order) for number in numbers]]
        torch.testing.assert_close(given, values[chosen], equal_nan=True)
        return sample(chosen)

    evaluator.sample_features = sample_features
    generated = torch.full((num_samples, WIDTH), torch.nan) if holds_out else sample(rows)
    flow: Any = SimpleNamespace(conditions={"it": kind}, takes_source=False)
    comparison = Comparison(evaluator, flow, {"steps": 3})
    comparison.generated = F.pad(generated, (0, 5))  # other networks' features follow
    return agreement(comparison)


@both
def test_labels(holds_out: bool) -> None:
    labels = torch.arange(COUNT) % 4
    told = F.pad(F.one_hot(labels, 4).float(), (0, WIDTH - 4)) + 0.01 * random(COUNT, WIDTH)
    perfect = score(LABELS, labels, told, lambda rows: told[rows] + 0.01, holds_out=holds_out)
    assert perfect == {
        "it_accuracy": 1,
        "it_accuracy_of_real": 1,
        "it_accuracy_by_chance": pytest.approx(0.25, abs=0.01),
    }
    other = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    deaf = score(LABELS, labels, told, lambda rows: told[other[rows]], holds_out=holds_out)
    assert deaf["it_accuracy"] == pytest.approx(deaf["it_accuracy_by_chance"], abs=0.1)
    assert deaf["it_accuracy_of_real"] == 1
    one = score(LABELS, labels, told, lambda rows: told[[8] * len(rows)], holds_out=holds_out)
    assert one["it_accuracy"] == pytest.approx(one["it_accuracy_by_chance"])
    blind = random(COUNT, WIDTH)
    unknown = score(LABELS, labels, blind, lambda rows: blind[rows], holds_out=holds_out)
    assert unknown["it_accuracy_of_real"] == pytest.approx(0.25, abs=0.1)


@both
def test_numbers(holds_out: bool) -> None:
    numbers = 10 * torch.rand(COUNT, generator=torch.Generator().manual_seed(1))
    told = numbers[:, None] * random(WIDTH, seed=2) + random(WIDTH, seed=3)
    perfect = score(NUMBER, numbers, told, lambda rows: told[rows], holds_out=holds_out)
    assert perfect == {"it_correlation": pytest.approx(1), "it_correlation_of_real": pytest.approx(1)}
    opposite = 10 * random(WIDTH, seed=2) + 2 * random(WIDTH, seed=3)
    swapped = score(NUMBER, numbers, told, lambda rows: opposite - told[rows], holds_out=holds_out)
    assert swapped["it_correlation"] == pytest.approx(-1)
    deaf = score(NUMBER, numbers, told, lambda rows: random(len(rows), WIDTH), holds_out=holds_out)
    assert deaf["it_correlation"] == pytest.approx(0, abs=0.15)
    one = score(NUMBER, torch.full((COUNT,), 3.0), told, lambda rows: told[rows], holds_out=holds_out)
    assert one == pytest.approx({"it_correlation": 0, "it_correlation_of_real": 0}, abs=1e-6)


@both
def test_captions(holds_out: bool) -> None:
    captions = CAPTION.parse([str(word) for word in range(COUNT)])
    real = random(COUNT, WIDTH)
    perfect = score(CAPTION, captions, real, lambda rows: real[rows], holds_out=holds_out)
    assert perfect == {"it_retrieval_at_5": 1, "it_retrieval_by_chance": 0.1}
    deaf = score(CAPTION, captions, real, lambda rows: random(len(rows), WIDTH, seed=1), holds_out=holds_out)
    assert deaf["it_retrieval_at_5"] == pytest.approx(0.1, abs=0.05)


def test_few_pictures_and_captions_of_several() -> None:
    """20 pictures, two for each caption: of these, one is a candidate, and all samples of it count."""
    captions = CAPTION.parse([str(number // 2) for number in range(20)])
    real = random(20, WIDTH)
    scores = score(CAPTION, captions, real, lambda rows: real[rows], holds_out=False, num_samples=50)
    assert scores == {"it_retrieval_at_5": 1, "it_retrieval_by_chance": 0.5}
    assert score(CAPTION, captions[:14], real[:14], lambda rows: real[rows], holds_out=False) == {}


@both
@pytest.mark.parametrize("kind", [LABELS, NUMBER, CAPTION])
def test_rows_without_a_value_are_left_out(kind: Any, holds_out: bool) -> None:
    """Rows without a value have features of other rows here, and do not change the scores."""
    values = {LABELS: torch.arange(COUNT) % 4, NUMBER: 10 * torch.arange(COUNT) / COUNT}.get(kind)
    if values is None:
        values = CAPTION.parse([str(number) for number in range(COUNT)])
    told = torch.cat((F.one_hot(torch.arange(COUNT) % 4, 4), torch.arange(COUNT)[:, None] / COUNT), dim=1)
    real = torch.cat((told, 0.01 * random(COUNT, WIDTH - 5)), dim=1)
    gaps = torch.arange(COUNT) % 3 == 0
    values, real = values.clone(), torch.where(gaps[:, None], real.flip(0), real)
    values[gaps] = kind.none(int(gaps.sum()), torch.device("cpu"))
    scores = score(kind, values, real, lambda rows: real[rows], holds_out=holds_out)
    assert scores.pop(f"it_{'retrieval' if kind is CAPTION else 'accuracy'}_by_chance", 0) < 0.3
    assert scores == pytest.approx(dict.fromkeys(scores, 1), abs=1e-3)
    values[:-7] = kind.none(COUNT - 7, torch.device("cpu"))
    assert score(kind, values, real, lambda rows: real[rows], holds_out=holds_out) == {}


def test_copies_of_training_pictures_gain_nothing() -> None:
    """Predict only rows outside of the fit, whose labels a regression with many features reproduces."""
    labels = torch.randint(4, (60,), generator=torch.Generator().manual_seed(0))
    real = random(60, 200) + 2 * F.pad(F.one_hot(labels, 4), (0, 196))
    seen = ridge(real, F.one_hot(labels, 4).double(), real).argmax(dim=1)
    assert (seen == labels).all()
    scores = score(LABELS, labels, real, lambda rows: real[rows], holds_out=False, num_samples=60)
    assert scores["it_accuracy"] == scores["it_accuracy_of_real"] < 0.5


@pytest.mark.parametrize("width", [5, 80])
def test_ridge_regression(width: int) -> None:
    features, noise = random(40, width) + 2, random(40, 2, seed=1)
    targets = (features[:, :2] + noise).double()
    scale = (features - features.mean(dim=0)).square().sum(dim=1).mean()
    fitted = RidgeCV((PENALTIES * scale).numpy()).fit(features.double().numpy(), targets.numpy())
    queries = random(3, 7, width, seed=2)
    expected = fitted.predict(queries.double().flatten(0, 1).numpy()).reshape(3, 7, 2)
    torch.testing.assert_close(ridge(features, targets, queries), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
