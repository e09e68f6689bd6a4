"""A checkpoint whose documents were rewritten, hashes included, is refused in a sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.cli.record import recorded_flags, with_record
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data.open import Pictures
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.load import load_flow, read_trained
from rectified_flow.runs import checkpoint
from rectified_flow.system.artifact import CHECKPOINT, MANIFEST, write_manifest
from rectified_flow.training.trainer import Trainer
from tests.training.runs import build_trainer, tiny_config

STEP = "checkpoints/step_00000002"
Reader = Callable[[Path, Trainer], None]
CONFIG, FLOW, STATE = checkpoint.CONFIG_FILE, checkpoint.FLOW_FILE, checkpoint.STATE_FILE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, flowers: ImageDataset) -> Path:
    """A run of two steps that a program started."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(folder, train_num_steps=2, num_samples=0)
    described = Pictures("synthetic-flowers", image_size=8)
    network = {"network": ["Unet"], "dim": 8, "dim_mults": [1, 2], "dropout": 0.1, "use_cfg": True}
    network |= {"prediction": "velocity"}
    build_trainer(config, ImageDataset(flowers.path, described), flags=network).train()
    return folder


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, flowers: ImageDataset) -> Trainer:
    """Build a trainer that resumes."""
    return build_trainer(tiny_config(tmp_path_factory.mktemp("unused"), num_samples=0), flowers)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rewrite(run: Path, name: str, content: bytes) -> None:
    """Put it in the place of a document, with its hash in the manifest."""
    (run / STEP / name).write_bytes(content)
    names = [each.name for each in (run / STEP).iterdir() if each.name != MANIFEST]
    write_manifest(run / STEP, CHECKPOINT, names)


def put(document: Any, key: str, value: Any) -> bytes:
    """The document with another value in one place."""
    *path, last = key.split(".")
    at = document
    for each in path:
        at = at[each]
    at[last] = value
    return json.dumps(document).encode()


def resume(run: Path, trainer: Trainer) -> None:
    trainer.state.load(run / STEP)


def evaluate(run: Path, _trainer: Trainer) -> None:
    trained = read_trained(run / STEP)
    assert trained.data is not None
    recorded_flags(run / STEP)


def sample(run: Path, _trainer: Trainer) -> None:
    load_flow(run)


def reflow(run: Path, _trainer: Trainer) -> None:
    words = ["--method", "reflow", "--teacher", str(run), "--output_dir", str(run.parent / "straight")]
    with_record(read_settings(TrainConfig, "", words))


def start_again(run: Path, _trainer: Trainer) -> None:
    read_settings(TrainConfig, "", ["--config", str(run / STEP / CONFIG)])


NAN = float("nan")
NONSENSE: list[tuple[Reader, str, str, list[Any]]] = [
    (resume, STATE, "step", ["6", 6.5, -6, None, True, 10**30, NAN, [6], {}]),
    *((resume, STATE, key, [-1, "1", None]) for key in ("updates", "summands", "images_seen")),
    (resume, STATE, "sums", [[], {"loss": []}, {"loss": "1"}, {"loss": None}, {"loss": 1}]),
    (resume, STATE, "ema_step", [-1, "4", []]),
    (resume, STATE, "grad_scaler", [{"scale": -1.0}, {"scale": NAN}, []]),
    (resume, STATE, "optimizer_numbers", [[], {"a": "b"}]),
    (evaluate, STATE, "run", [None, {}, [], "new"]),
    *((evaluate, STATE, f"run.{key}", ["0", -1, 0.5]) for key in ("seed", "global_batch")),
    *((evaluate, STATE, f"run.{key}", [None, 3]) for key in ("dataset", "origin")),
    (sample, FLOW, "kind", ["Foo", None, 3, "Pixels", "Unet"]),
    *((sample, FLOW, key, ["foo", None]) for key in ("prediction", "coupling", "distance", "condition_dropout")),
    (sample, FLOW, "time_distribution", [3, {"kind": "Pixels"}, []]),
    (sample, FLOW, "time_distribution.mean", ["0", None, NAN]),
    (sample, FLOW, "space", [3, {}, {"kind": "Uniform", "shift": 1.0}]),
    (sample, FLOW, "space.shape", [[3, 7, 7], [4, 8, 8], [3, 8], [3, -8, 8], [3, 8, 10**30], "8", [3, 8, "8"]]),
    (sample, FLOW, "network", [None, 3, {"kind": "Pixels"}, {"kind": "Unet", "dim": 16}]),
    (sample, FLOW, "network.dim", ["8", 8.5, 0, -8, None, 10**30]),
    (sample, FLOW, "network.blocks_per_level", [0, -1, 10**30]),
    (sample, FLOW, "condition_dropout", [-0.5, 6.5]),
    (sample, FLOW, "network.dim_mults", [[], [1, "2"], 2, [1, 0]]),
    (sample, FLOW, "network.conditions", [[], {"labels": 3}, {"x": {"kind": "Uniform"}}]),
    (sample, FLOW, "network.conditions.labels.names", [["a"], [1, 2], "ab"]),
    (evaluate, CONFIG, "training", [None, []]),
    (evaluate, CONFIG, "data", [[], {"kind": 3}, {"kind": "Uniform"}, {"kind": "Pictures", "dataset": 3}]),
    (evaluate, CONFIG, "data.image_size", ["8", 8.5, -8]),
    (evaluate, CONFIG, "data.cache_dir", [3, []]),
    (reflow, CONFIG, "training", [[], {}, "dim", None]),
    (reflow, CONFIG, "training.dim", ["8", 8.5, [8], -8, None]),
    (reflow, CONFIG, "training.prediction", ["foo", 3]),
    (start_again, CONFIG, "training.dim", ["8", {}, [8, "--import", "os"]]),
    (start_again, CONFIG, "training.dim_mults", [["--import", "os"], [1, "--import", "os"], 2]),
]


@pytest.mark.parametrize(
    ("reader", "name", "key", "value"),
    [(*case, value) for *case, values in NONSENSE for value in values],
    ids=lambda value: str(getattr(value, "__name__", value))[:25],
)
def test_a_value_that_makes_no_sense(
    run: Path, trainer: Trainer, reader: Reader, name: str, key: str, value: Any
) -> None:
    rewrite(run, name, put(json.loads((run / STEP / name).read_text()), key, value))
    with pytest.raises(UsageError) as refused:
        reader(run, trainer)
    assert "\n" not in str(refused.value)
    assert STEP in str(refused.value) or "`dim`" in str(refused.value)


def test_the_documents_themselves_are_read(run: Path, trainer: Trainer) -> None:
    """Read unchanged documents, so that the tests above can fail."""
    rewrite(run, STATE, (run / STEP / STATE).read_bytes())
    for reader in (resume, evaluate, sample, reflow):
        reader(run, trainer)
