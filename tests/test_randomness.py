"""Tests of draws as functions of seed, purpose, step and row."""

from contextlib import suppress

import pytest
import torch

from rectified_flow import randomness
from rectified_flow.randomness import BatchRows, Samples, deterministic

CPU = torch.device("cpu")


def draw(rows: BatchRows, purpose: str = "noise") -> torch.Tensor:
    count = len(range(rows.total)[rows.index]) if isinstance(rows.index, slice) else len(rows.index)
    with deterministic(rows):
        return randomness.randn(purpose, (count, 2), CPU)


def test_parts_hold_their_rows_of_the_whole() -> None:
    whole = draw(BatchRows(1, 2, 12, slice(None)))
    assert torch.equal(draw(BatchRows(1, 2, 12, slice(1, None, 3))), whole[1::3])
    assert torch.equal(draw(BatchRows(1, 2, 12, [7, 0])), whole[[7, 0]])


def test_seed_step_and_purpose_each_matter() -> None:
    reference = draw(BatchRows(1, 2, 4, slice(None)))
    assert torch.equal(reference, draw(BatchRows(1, 2, 4, slice(None))))
    for other in (draw(BatchRows(0, 2, 4, slice(None))), draw(BatchRows(1, 3, 4, slice(None)))):
        assert not torch.equal(reference, other)
    assert not torch.equal(reference, draw(BatchRows(1, 2, 4, slice(None)), "time"))


def test_the_default_generator_has_no_say() -> None:
    torch.manual_seed(0)
    one = draw(BatchRows(1, 2, 4, slice(None)))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(one, draw(BatchRows(1, 2, 4, slice(None))))
    assert torch.equal(state, torch.get_rng_state())


def test_outside_training_the_default_generator_draws() -> None:
    torch.manual_seed(0)
    one = randomness.randn("noise", (4, 2), CPU)
    torch.manual_seed(0)
    assert torch.equal(one, torch.randn(4, 2))


def test_plain_torch_draws_inside_differ_by_part_and_step_and_come_again() -> None:
    """Draws of ``nn.Dropout``, for example, are the same in a resumed run."""

    def drawn(rows: BatchRows | Samples) -> tuple[float, ...]:
        with deterministic(rows):
            return tuple(torch.rand(3).tolist())

    places: list[BatchRows | Samples] = [
        *(BatchRows(1, step, 12, slice(rank, None, 2)) for step in (0, 1) for rank in (0, 1)),
        BatchRows(2, 0, 12, slice(0, None, 2)),
        *(Samples(1, range(first, first + 4)) for first in (0, 4)),
    ]
    torch.manual_seed(0)
    first = [drawn(rows) for rows in places]
    assert len(set(first)) == len(places)
    torch.manual_seed(1)
    assert [drawn(rows) for rows in places] == first


def test_generators_are_restored_after_an_error_and_blocks_nest() -> None:
    state = torch.get_rng_state()
    outer, inner = BatchRows(1, 2, 4, slice(None)), Samples(5, [3])
    with suppress(OSError), deterministic(outer):
        before = randomness.randn("noise", (4, 2), CPU)
        with suppress(OSError), deterministic(inner):
            randomness.randn("noise", (1, 2), CPU)
            raise OSError
        assert torch.equal(randomness.randn("noise", (4, 2), CPU), before)
        raise OSError
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    one = randomness.randn("noise", (4, 2), CPU)
    assert not torch.equal(one, before)


def test_a_sample_is_drawn_by_its_number() -> None:
    def samples(numbers: list[int]) -> torch.Tensor:
        with deterministic(Samples(1, numbers)):
            return randomness.randint("labels", 1000, (len(numbers), 5), CPU)

    whole = samples([0, 1, 2, 3])
    assert torch.equal(samples([2, 0]), whole[[2, 0]])
    assert len(whole.unique(dim=0)) == 4


def test_mix_is_the_same_everywhere() -> None:
    assert randomness.mix(0, "noise", 1) == randomness.mix(0, "noise", 1) == 2376061928063757211


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_rate_and_scale(probability: float) -> None:
    x = torch.ones(64, 32, 8, 8)
    with deterministic(BatchRows(0, 0, 64, slice(None))):
        dropped = randomness.dropout(x, probability, layer=1)
    kept = dropped != 0
    assert kept.float().mean() == pytest.approx(1 - probability, abs=0.004)
    assert dropped[kept].unique().item() == pytest.approx(1 / (1 - probability))
    # Independent between rows, between elements, and between neighbours.
    assert kept.float().mean(dim=0).std() == pytest.approx((probability * (1 - probability) / 64) ** 0.5, rel=0.1)
    agreement = (kept[:, :, :, 1:] == kept[:, :, :, :-1]).float().mean()
    assert agreement == pytest.approx(probability**2 + (1 - probability) ** 2, abs=0.006)
    correlations = torch.corrcoef(kept.flatten(1).float())[~torch.eye(64, dtype=torch.bool)]
    assert correlations.std() == pytest.approx(kept[0].numel() ** -0.5, rel=0.1)
    assert correlations.abs().max() < 6 * kept[0].numel() ** -0.5


def test_dropout_differs_by_layer_and_step_and_not_by_pass_or_part() -> None:
    x = torch.ones(8, 4, 8, 8)

    def mask(layer: int = 1, step: int = 0, part: slice = slice(None)) -> torch.Tensor:
        with deterministic(BatchRows(0, step, 8, part)):
            return randomness.dropout(x[part], 0.5, layer)

    reference = mask()
    assert torch.equal(reference, mask())
    assert torch.equal(reference[1::2], mask(part=slice(1, None, 2)))
    for other in (mask(layer=2), mask(step=1)):
        assert (reference == other).float().mean() == pytest.approx(0.5, abs=0.05)
