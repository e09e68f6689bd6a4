"""Tests of the scores of translations, by results that equal their targets."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rectified_flow.condition import Picture
from rectified_flow.data.degraded import Degraded
from rectified_flow.evaluation import evaluator as evaluators
from rectified_flow.evaluation import scores
from rectified_flow.evaluation.evaluator import Comparison, Evaluator, suited
from rectified_flow.evaluation.features import average_colours
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.degradations import Downsample
from rectified_flow.spaces.pixels import Pixels
from tests.evaluation.runs import COUNT, pictures_of, save_run
from tests.tiny_flows import FLOWS, Additive


def test_training_pictures_are_not_the_neighbours_of_their_own_sources(tmp_path: Path) -> None:
    """Without held-out pictures, the target of a source is a training picture, and the nearest to it."""
    space = Pixels((3, 8, 8))
    pictures = pictures_of(save_run(tmp_path, FLOWS["rectified"]()))
    data: Any = Degraded(pictures, Downsample(2), space)
    flow = RectifiedFlow(Additive({"source": Picture((3, 8, 8))}), space=space)
    none: dict[str, Any] = {"frechet_distance": lambda *_: 0.0, "kernel_distance": lambda *_: (0.0, None)}
    with patch.object(evaluators, "load_features", lambda *_: average_colours()), patch.multiple(scores, **none):
        evaluator = Evaluator(data, "efficientnet_lite0", num_samples=COUNT, metrics=("translation",))
        evaluator.prepare()
        results = evaluator.extract(data.read_pictures(evaluator.given(flow)[1]))
        numbers = evaluator.measure(Comparison(evaluator, flow, samples=results))
    features = evaluator.real.features[0]
    nearest = torch.cdist(features, features).fill_diagonal_(torch.inf).amin().item() ** 2
    assert numbers["partner_distance"] == pytest.approx(0, abs=1e-6)
    assert numbers["partner_found"] == 1
    assert numbers["neighbour_partner_distance"] > 0.99 * nearest


def test_right_results_are_no_copies(tmp_path: Path) -> None:
    pictures = pictures_of(save_run(tmp_path, FLOWS["rectified"]()))
    translating = RectifiedFlow(Additive({}), space=Pixels((3, 8, 8)), from_source=True)
    unpaired, names = pictures.changed(source=pictures), ("frechet", "copies")
    for flow, training, held_out in (
        (FLOWS["rectified"](), pictures, None),
        (translating, unpaired, None),
        (translating, pictures, pictures),
    ):
        assert suited(names, flow, training, held_out) == ["frechet", "copies"]
    assert suited(names, translating, pictures, None) == ["frechet"]
