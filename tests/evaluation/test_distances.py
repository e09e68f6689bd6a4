"""Tests of distances between sets of features against closed forms, and of the cache of features."""

import sys
from pathlib import Path
from subprocess import run
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import distances
from rectified_flow.evaluation.distances import (
    frechet_distance,
    kernel_distance,
    mirrored,
    nearest,
    nearness,
    precision_and_recall,
    share_of_copies,
)
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import Features, average_colours, reference_features
from tests.programs import frechet_of_few


def normal(count: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)) * scale + shift


def all_different(count: int, seed: int = 0) -> torch.Tensor:
    """Colours of pictures of which no two are near-duplicates."""
    return torch.randn(count, 3 * 8 * 8, generator=torch.Generator().manual_seed(count + seed))


def test_frechet_distance_of_normal_distributions() -> None:
    """|m1 - m2|^2 + sum((s1 - s2)^2) where the covariances are multiples of one"""
    real = normal(20_000, 0)
    assert frechet_distance(real, normal(20_000, 1, scale=2, shift=0.5)) == pytest.approx(4 * 0.25 + 4, rel=0.03)
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-4)


def test_the_frechet_distance_of_few_samples_in_the_tests_is_that_of_the_program() -> None:
    real, generated = normal(24, 0), normal(9, 1, scale=2, shift=0.5)
    assert frechet_of_few(real, generated) == pytest.approx(frechet_distance(real, generated), rel=1e-4)
    assert frechet_of_few(real[:3], generated[:2]) == pytest.approx(frechet_distance(real[:3], generated[:2]), rel=1e-3)


def test_kernel_distance_is_unbiased_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "SUBSETS", 10)  # less to compute
    real = normal(1200, 0)
    mean, deviation = kernel_distance(real, normal(1200, 1))
    assert abs(mean) < 0.05
    assert deviation is not None
    assert 0 < deviation < 0.1
    assert kernel_distance(real, normal(1200, 1)) == (mean, deviation)
    assert kernel_distance(real, normal(1200, 2, shift=1))[0] > 1
    assert kernel_distance(real, normal(600, 1))[1] is None, "each subset has all 600, and tells nothing of others"


def test_kernel_distance_by_hand() -> None:
    """k(a, b) = (a b + 1)^3 in one dimension: (8 + 8) / 2 within each, 1 between 1 and 0."""
    real, generated = torch.ones(2, 1), torch.zeros(2, 1)
    assert kernel_distance(real, generated)[0] == pytest.approx(8 + 1 - 2)


def test_the_precision_of_sampling_does_not_round_the_kernel_distance() -> None:
    real, generated = normal(40, 0), normal(40, 1)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = kernel_distance(real, generated)
    assert rounded == kernel_distance(real, generated)


def test_samples_of_the_same_distribution_have_precision_and_recall() -> None:
    real = normal(300, 0)
    assert precision_and_recall(real, real + 1e-4) == {"precision": 1, "recall": 1}
    assert min(precision_and_recall(real, normal(300, 1)).values()) > 0.8


def apart(queries: Tensor, real: Tensor, colours: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return features of both, with colours of the queries that are like none of the others."""
    return [queries, torch.full((len(queries), colours.shape[1]), 1e4)], [real, colours]


def test_nearness_by_hand() -> None:
    """Nearest are 10, whose own neighbour is at 11, and 30, whose own neighbour is 19 away."""
    real = torch.tensor([[0.0], [10.0], [11.0], [30.0]])
    queries = torch.tensor([[9.8], [28.1], [40.0], [11.0]])
    colours = all_different(4)
    torch.testing.assert_close(nearness(*apart(queries, real, colours)), torch.tensor([0.2, 0.1, 10 / 19, 0.0]))
    assert share_of_copies(*apart(queries, real, colours)) == 3 / 4


def test_a_picture_that_is_there_twice_has_copies() -> None:
    """0 is there twice, once mirrored: the nearest other picture is 10 away, and not 0.1."""
    real = torch.tensor([[0.0], [0.1], [10.1]])
    first, other = all_different(2)
    colours = torch.stack((first, mirrored(first[None])[0], other))
    queries = torch.tensor([[-1.0], [1.1], [5.2]])
    torch.testing.assert_close(nearness(*apart(queries, real, colours)), torch.tensor([1 / 10.1, 0.1, 4.9 / 10]))
    alike = nearness(*apart(queries, real[:2], colours[:2]))
    torch.testing.assert_close(alike, torch.tensor([10.0, 10, 51]), msg="of all alike, the other is the measure")


def test_others_of_the_same_kind_are_no_copies() -> None:
    real = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    others = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    assert share_of_copies(*apart(others, real, all_different(300))) == 0
    assert share_of_copies(*apart(torch.cat((others, real + 0.01)), real, all_different(300))) == 0.5


def test_copies_are_found_by_their_colours_too() -> None:
    """Noise changes the features of a network, and a mirrored copy has other colours."""
    real, others = ([all_different(300, seed), all_different(300, seed + 1)] for seed in (1, 3))
    for copied in (real[-1], mirrored(real[-1]), real[-1] + 0.01 * others[-1]):
        assert share_of_copies([others[0], copied], real) == 1
    assert share_of_copies(others, real) == 0


def test_what_is_missing_and_what_is_wrong_are_told_apart() -> None:
    real = torch.cat((normal(200, 0), normal(200, 1, shift=20)))
    half = precision_and_recall(real, normal(200, 2))
    assert half["precision"] > 0.8, "all of it is real enough"
    assert half["recall"] < 0.6
    assert precision_and_recall(real, normal(200, 3, shift=-50)) == {"precision": 0, "recall": 0}


def test_nearest_neighbours() -> None:
    real = torch.tensor([[0.0], [10.0], [11.0], [30.0]])
    assert nearest(torch.tensor([[10.4], [29.0]]), real, 2).tolist() == [[1, 2], [3, 2]]


def test_an_evaluator_knows_the_scores_of_the_package() -> None:
    """Run a process of its own, since other tests import the module of the scores."""
    code = """
        from rectified_flow import Evaluator
        print(Evaluator([0], "inception", num_samples=1, metrics=["likelihood", "agreement"]).scores)
    """
    done = run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False)
    assert "<function likelihood" in done.stdout, done.stderr


def test_a_feature_network_that_does_not_exist_is_refused() -> None:
    data: Any = [0]
    with pytest.raises(UsageError, match="`feature_network` is vgg; it must be 'inception' or 'efficientnet_lite0'"):
        Evaluator(data, "vgg", num_samples=1)  # type: ignore[arg-type]


def test_colours_are_means_of_fields() -> None:
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    images[:, 0, :2, :2] = 255
    colours = average_colours().extract(images).reshape(3, 8, 8) * 64 + 127.5
    assert colours[0, 0, 0] == pytest.approx(255)
    assert colours.sum() == pytest.approx(255)


def test_no_byte_of_saved_features_changes_unnoticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = ImageDataset(open_store(SyntheticFlowers(8, count=5), 4, cache_dir=tmp_path))
    seen = list[int]()

    def extract(images: Tensor) -> Tensor:
        seen.append(len(images))
        return images.float().mean(dim=(2, 3))

    features = Features("means-1.0", "", "", "", extract)
    expected = reference_features(dataset, features)
    assert torch.equal(reference_features(dataset, features), expected)
    assert seen == [5], "they were not kept"
    path = dataset.path.with_name(f"{dataset.path.name}-features-means-1.0") / "features.npy"
    whole = path.read_bytes()
    assert np.array_equal(np.load(path), expected.numpy())
    for place in (0, 70, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert torch.equal(reference_features(dataset, features), expected)
        assert (
            f"warning: the features {path.parent} is damaged (features.npy was altered) and is made again"
            in capsys.readouterr().out
        )
        assert path.read_bytes() == whole, "they were not kept again"
    assert seen == 5 * [5]
