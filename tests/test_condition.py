"""Tests of conditions: missing values, draws, dropout and embeddings."""

import pytest
import torch
from torch import Tensor

from rectified_flow.condition import (
    LARGEST,
    Condition,
    ConditionSpecs,
    Labels,
    Number,
    Picture,
    all_none,
    drop,
    none_of,
)
from rectified_flow.errors import UsageError
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, Samples, deterministic
from rectified_flow.registry import build, describe
from tests.networks.tiny_unets import small

CPU = torch.device("cpu")
BOTH: ConditionSpecs = {"labels": Labels(3, ("a", "b", "c")), "place": Number((0.0, 9.0))}


def values(count: int) -> dict[str, Tensor]:
    return {"labels": torch.arange(count) % 3, "place": torch.arange(1.0 * count)}


@pytest.mark.parametrize("kind", BOTH.values())
def test_none_is_recognised_and_embedded(kind: Condition) -> None:
    none = kind.none(4, CPU)
    assert len(none) == 4
    assert all_none({"it": kind}, {"it": none}).all()
    assert not all_none({"it": kind}, {"it": torch.zeros_like(none)}).any()
    assert torch.equal(none_of({"it": kind}, {"it": torch.zeros_like(none)})["it"].nan_to_num(), none.nan_to_num())
    assert build(describe(kind)) == kind
    embedded = kind.embedding(7)(none)
    assert embedded.shape == (4, 7)
    assert embedded.isfinite().all()


def test_labels_are_drawn_uniformly_and_by_number() -> None:
    torch.manual_seed(0)
    drawn = Labels(3).draw("labels", 3000, CPU)
    assert drawn.bincount(minlength=3).tolist() == pytest.approx([1000] * 3, abs=100)
    with deterministic(Samples(0, range(20))):
        whole = Labels(3).draw("labels", 20, CPU)
    with deterministic(Samples(0, [7, 3])):
        assert torch.equal(Labels(3).draw("labels", 2, CPU), whole[[7, 3]])


def test_conditions_are_dropped_together_and_each_on_its_own() -> None:
    torch.manual_seed(0)
    kinds: ConditionSpecs = {"labels": BOTH["labels"], "place": Number((0.0, 1.0))}
    given = {"labels": torch.arange(40_000) % 3, "place": torch.arange(40_000.0)}
    dropped = drop(kinds, given, 0.25)
    gone = {name: all_none(kinds, {name: each}) for name, each in dropped.items()}
    shares = {"both": gone["labels"] & gone["place"], "labels": gone["labels"], "place": gone["place"]}
    expected = {"both": 0.25 + 0.75 * 0.25**2, "labels": 0.4375, "place": 0.4375}
    assert {name: each.float().mean().item() for name, each in shares.items()} == pytest.approx(expected, abs=0.01)
    for name, each in dropped.items():
        assert each.dtype == given[name].dtype
        assert torch.equal(each[~gone[name]], given[name][~gone[name]])
    assert torch.equal(all_none(kinds, dropped), shares["both"])
    assert not any(all_none(kinds, {name: each}).any() for name, each in given.items()), "the batch itself was changed"


def test_labels_and_a_source_are_dropped_together() -> None:
    """Runs of earlier versions, which had no columns, keep their random draws."""
    kinds: ConditionSpecs = {"labels": Labels(3), "source": Picture((1, 1, 1))}
    dropped = drop(kinds, {"labels": torch.arange(4000) % 3, "source": torch.zeros(4000, 1, 1, 1)}, 0.25)
    gone = [all_none(kinds, {name: each}) for name, each in dropped.items()]
    assert torch.equal(*gone)
    assert gone[0].float().mean() == pytest.approx(0.25, abs=0.03)


def test_a_number_is_its_share_of_the_training_data() -> None:
    """The quantiles 0, 1, 10 are the shares 0, 1/2, 1, and numbers beyond the ends have the embedding of the end."""
    torch.manual_seed(0)
    number = Number((0.0, 1.0, 10.0))
    embedding = number.embedding(5)
    same = Number((0.0, 2.0, 4.0)).embedding(5)
    same.load_state_dict(embedding.state_dict())
    given = torch.tensor([-7.0, 0.0, 0.5, 1.0, 5.5, 10.0, 99.0])
    torch.testing.assert_close(embedding(given), same(torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0])))
    assert not torch.allclose(embedding(given[2:3]), embedding(given[3:4]))


def test_no_number_has_an_embedding_of_its_own() -> None:
    embedding = Number((0.0, 1.0)).embedding(3)
    torch.nn.init.ones_(embedding.none)  # type: ignore[arg-type]
    values = torch.tensor([torch.nan, LARGEST, -LARGEST])
    assert torch.equal(embedding(values), torch.ones(3, 3))


def test_a_run_that_starts_from_another_keeps_the_scale_of_its_own_numbers() -> None:
    old, new = (Number((float(year), year + 10.0)).embedding(3) for year in (1900, 2000))
    new.load_state_dict(old.state_dict())
    assert dict(new.named_buffers())["low"].tolist() == [2000]
    assert "low" not in old.state_dict()


def test_numbers_are_drawn_from_the_training_data() -> None:
    with deterministic(Samples(0, range(20_000)), torch.device("cpu")):
        drawn = Number((0.0, 1.0, 10.0)).draw("size", 20_000, torch.device("cpu"))
    assert ((drawn >= 0) & (drawn <= 10)).all()
    assert (drawn < 1).float().mean() == pytest.approx(0.5, abs=0.02)
    assert drawn[drawn > 1].mean() == pytest.approx(5.5, abs=0.1)


def test_values_are_read_as_a_user_writes_them() -> None:
    assert Number((0.0, 1.0)).parse(["0.5", "-2"]).tolist() == [0.5, -2]
    assert Labels(3, ("cat", "dog", "1")).parse(["dog", "0", "1"]).tolist() == [1, 0, 2], "a name before a number"
    assert Labels(3, ("Red", "red", "true")).parse(["red", "Red", "True"]).tolist() == [1, 0, 2]
    with pytest.raises(UsageError, match="RED does not exist"):
        Labels(3, ("Red", "red", "true")).parse(["RED"])
    with pytest.raises(UsageError, match=r"^big is not a number$"):
        Number((0.0, 1.0)).parse(["big"])
    with pytest.raises(UsageError, match=r"0\.5 kg is not a number: pass it without its unit kg"):
        Number((0.0, 1.0)).parse(["0.5 kg"])
    with pytest.raises(UsageError, match="dg does not exist: pass names like cat, dog, or numbers up to 1"):
        Labels(2, ("cat", "dog")).parse(["dg"])


def test_what_is_dropped_is_a_function_of_the_row() -> None:
    def gone(part: slice) -> Tensor:
        with deterministic(BatchRows(0, 3, 40, part)):
            some = {name: each[part] for name, each in values(40).items()}
            return all_none(BOTH, drop(BOTH, some, 0.5))

    whole = gone(slice(None))
    assert 0 < whole.sum() < 40
    assert torch.equal(gone(slice(1, None, 4)), whole[1::4])


def test_a_row_is_unconditional_if_nothing_is_left() -> None:
    given = {"labels": torch.tensor([3, 3, 0]), "place": torch.tensor([torch.nan, 0.0, torch.nan])}
    assert all_none(BOTH, given).tolist() == [True, False, False]


def unet(conditions: ConditionSpecs) -> Unet:
    return small(dim=8, conditions=conditions, attention_sides=(), blocks_per_level=1)


def test_a_missing_number_is_as_good_as_none() -> None:
    network, x, t = unet({"place": Number((0.0, 9.0))}), torch.randn(3, 3, 8, 8), torch.rand(3)
    place = torch.tensor([1.0, torch.nan, 0.0])
    given, without = network(x, t, place=place), network(x, t)
    torch.testing.assert_close(given[1], without[1])
    assert not torch.allclose(given[0], without[0], atol=1e-3)
    assert not torch.allclose(given[2], without[2], atol=1e-3), "zero is a number"


@pytest.mark.parametrize("names", [("x",), ("labels", "t"), ("r",)])
def test_a_condition_with_the_name_of_another_input_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"the condition {names[-1]!r} has the name of another input"):
        unet({name: Labels(2) for name in names})


def test_the_number_of_a_class_is_no_name_if_names_are_numbers() -> None:
    labels = Labels(3, ("1", "2", "10"))
    assert labels.parse(["1", "10"]).tolist() == [0, 2]
    with pytest.raises(UsageError, match=r"^0 does not exist: pass names like 1, 2, 10$"):
        labels.parse(["0"])
    assert Labels(2, ("a", "b")).parse(["0", "b"]).tolist() == [0, 1]
