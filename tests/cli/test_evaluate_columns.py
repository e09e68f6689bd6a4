"""evaluate.py on a run with columns: its conditions are those of the run, and samples are scored against them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.evaluate import evaluate, real_data
from rectified_flow.cli.flags.sampling import EvaluateConfig, MeasureConfig
from rectified_flow.cli.train import train
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flags import parse
from rectified_flow.load import read_trained
from rectified_flow.runs import checkpoint
from tests.programs import assert_refused
from tests.ranks import run_on_ranks

COUNT = 60
TINY = (
    "--image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 8 --augment 0 --train_num_steps 2 --save_every 2"
    " --num_samples 0 --holdout 0.4 --condition_on all --condition_types story=caption"
)
KINDS = {"pixels": "--use_cfg", "latents": "--autoencoder haar --dim_mults 1"}
SCORES = {
    *(f"species_accuracy{suffix}" for suffix in ("", "_of_real", "_by_chance")),
    *(f"size_correlation{suffix}" for suffix in ("", "_of_real")),
    *(f"story_retrieval_{suffix}" for suffix in ("at_5", "by_chance")),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of cats and dogs with columns, some of which are empty; a picture has several stories."""
    folder = tmp_path_factory.mktemp("described") / "pictures"
    rows = []
    for number in range(COUNT):
        name = f"{'cat' if number % 2 else 'dog'}/{number:02}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / name)
        row: dict[str, Any] = {"file_name": name, "species": ["lynx", "fox", "wolf"][number % 3], "size": number / 7}
        stories = [f"the story of number {number}", f"once upon a time {number}"]
        rows.append({**row, "story": stories, **({"size": None, "story": ""} if number % 11 == 0 else {})})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, pictures: Path) -> Path:
    output_dir, cache_dir = pictures.parent / request.param, pictures.parent / "cache"
    paths = ["--dataset_path", pictures, "--cache_dir", cache_dir, "--output_dir", output_dir]
    flags = [*TINY.split(), *KINDS[request.param].split(), *map(str, paths)]
    assert train(parse(TrainConfig, "", flags))
    return output_dir


def measure(*flags: object) -> None:
    sys.argv = ["evaluate.py", *map(str, flags), "--feature_network", "efficientnet_lite0", "--num_samples", "31"]
    evaluate(parse(EvaluateConfig, "Measure."))


def test_the_same_scores_on_two_processes(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for world_size in (2, 1):
        flags = ["--checkpoint", run, "--steps", 1, "--batch_size", 5, "--output_dir", tmp_path / str(world_size)]
        run_on_ranks(world_size, measure, *flags)
    [one], [two] = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("1", "2"))
    assert "was trained on" not in "".join(capfd.readouterr())
    scores = one["distances"]
    labelled = (
        {f"labels_accuracy{suffix}" for suffix in ("", "_of_real", "_by_chance")} if run.name == "pixels" else set()
    )
    assert scores.keys() >= SCORES | labelled
    assert not [name for name in scores if name.startswith("labels_") and not labelled]
    assert two["distances"] == pytest.approx(scores, rel=1e-3, abs=1e-3)


def test_samples_have_the_conditions_of_training_rows_where_copies_are_counted(run: Path) -> None:
    trained = read_trained(checkpoint.resolve(run))
    training, held_out, _ = real_data(MeasureConfig(), trained, join_processes())
    assert isinstance(training, ImageDataset)
    assert held_out is not None
    assert trained.run is not None
    assert training.fingerprint == trained.run.dataset
    evaluator = Evaluator(training, "efficientnet_lite0", num_samples=31, held_out=held_out)
    texts = training.condition_texts(evaluator.order(training, 31))
    kind = training.columns["story"].kind
    given = evaluator.given(trained.flow)[2]
    assert given["story"].shape[0] == len(texts["story"])
    np.testing.assert_array_equal(given["story"], kind.parse(texts["story"]))
    assert len({*texts["story"]} & {*held_out.condition_texts(range(len(held_out)))["story"]} - {""}) == 0


def test_columns_that_have_changed(run: Path, pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "pictures")
    (tmp_path / "pictures/metadata.jsonl").unlink()
    flags = f"--checkpoint {run} --dataset_path {tmp_path}/pictures --cache_dir {tmp_path}/cache"
    assert_refused(
        "evaluate.py",
        1,
        flags,
        "--condition_types story is not in --condition_on, with none; write",
    )
