"""Every kind of data, way to train and custom part passes through every program alike."""

import json
import wave
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from rectified_flow.cli.evaluate import real_data
from rectified_flow.condition import LARGEST
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.export.call import MODEL_FILE, NetworkCall
from rectified_flow.export.onnx import load_program
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow, read_trained
from rectified_flow.runs import checkpoint
from rectified_flow.training.evaluations import default_guidance
from tests.contract.kinds import KINDS, LAST, MIDDLE, Runs, sample
from tests.programs import program, quick_program
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses


def kinds(contract: str) -> pytest.MarkDecorator:
    """Parametrize a test over all kinds, and mark those as slow for which this contract is."""
    rows = [pytest.param(name, marks=pytest.mark.slow if contract in kind.slow else ()) for name, kind in KINDS.items()]
    return pytest.mark.parametrize("runs", rows, indirect=True)


@pytest.fixture
def runs(request: pytest.FixtureRequest, kind_runs: Any) -> Runs:
    return kind_runs(request.param)


@kinds("train")
def test_the_same_run_on_one_process_and_on_two(runs: Runs) -> None:
    one, two = runs.one, runs.two
    assert losses(one) == pytest.approx(losses(two), rel=1e-3)
    assert len(set(losses(one).values())) == 4
    documents = [json.loads((run / "config.json").read_text()) for run in (one, two)]
    assert documents[0]["flow"] == documents[1]["flow"]


@kinds("resume")
def test_a_resumed_run_is_the_same_to_the_byte(runs: Runs) -> None:
    straight, resumed = runs.straight, runs.resumed
    assert_same_bytes(straight, resumed, 4)
    assert losses(straight) == losses(resumed)
    before, after = (load_file(resumed / step / "model.safetensors") for step in (MIDDLE, LAST))
    assert any(not torch.equal(before[name], after[name]) for name in after), "nothing was trained"


def read(path: Path) -> np.ndarray[Any, Any]:
    match path.suffix:
        case ".npy":
            return np.load(path)
        case ".wav":
            with wave.open(str(path)) as file:
                return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
        case ".tif":
            return tifffile.imread(path).astype(np.int64)
        case _:
            return np.asarray(Image.open(path)).astype(int)


@kinds("sample")
def test_samples_are_those_of_two_processes_in_smaller_batches_and_like_the_preview(runs: Runs, tmp_path: Path) -> None:
    kind = runs.kind
    assert runs.call("sample.py", kind.sample, tmp_path / "one") == ""
    flags = f"--checkpoint {runs.one} {kind.sample} --batch_size 1 --output_dir {tmp_path}/two".format(data=runs.data)
    run_on_ranks(2, sample, kind, flags.split())
    made = [[read(tmp_path / count / name) for name in kind.written] for count in ("one", "two")]
    for one, two in zip(*made, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1 if one.dtype.kind == "i" else 0)
    assert len({one.tobytes() for one in made[0]}) == 3
    preview, grid = (Image.open(path) for path in (runs.one / "samples/step_00000004.png", tmp_path / "one/grid.png"))
    assert preview.getextrema() != ((255, 255),) * 3
    assert (preview.size == grid.size) == kind.preview_is_grid


@kinds("evaluate")
def test_it_is_evaluated(runs: Runs, tmp_path: Path) -> None:
    flags = f"--num_samples {runs.kind.samples} --steps 2 --feature_network efficientnet_lite0"
    flags += f" --metric {runs.kind.metrics}" * bool(runs.kind.metrics)
    assert runs.call("evaluate.py", flags, tmp_path, quick_program) == ""
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    measured = result["distances"]
    assert measured.keys() >= set(runs.kind.scores)
    assert np.isfinite(list(measured.values())).all()
    if (distance := measured.get("colours_8x8_frechet_distance")) is not None:
        expected = distance_of_colours(runs)
        assert 0.1 < distance == pytest.approx(expected, rel=1e-3)


@torch.no_grad()
def distance_of_colours(runs: Runs) -> float:
    """Return the Fréchet distance between the mean colours of the training pictures and of samples."""
    for module in runs.kind.imports:
        import_module(module)
    trained = read_trained(checkpoint.resolve(runs.one))
    real, held_out, _ = real_data(trained)
    evaluator = Evaluator(real, "efficientnet_lite0", num_samples=runs.kind.samples, held_out=held_out, metrics=())
    how = {"steps": 2, **default_guidance(trained.flow)}
    pictures = real.read_pictures(range(len(real))), *evaluator.sampled(trained.flow, range(runs.kind.samples), **how)
    one, other = (F.adaptive_avg_pool2d(each.double(), 8).flatten(1) / 64 for each in pictures)
    roots = [(each - each.mean(dim=0)) / (len(each) - 1) ** 0.5 for each in (one, other)]
    covariances = [root.T @ root for root in roots]
    product = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    apart = (one.mean(dim=0) - other.mean(dim=0)).square().sum()
    return float(apart + covariances[0].trace() + covariances[1].trace() - 2 * product)


@kinds("export")
def test_it_is_exported_or_a_sentence_says_why_not(runs: Runs, tmp_path: Path) -> None:
    refusal = runs.call("export.py", f"--format {runs.kind.format}", tmp_path, quick_program)
    assert (runs.kind.export in refusal) if runs.kind.export else not refusal, refusal
    assert (tmp_path / runs.kind.exported).exists() == (not runs.kind.export)


EXPORTED = [
    pytest.param(name, marks=() if name == "own network" else pytest.mark.slow)  # the smallest network
    for name, kind in KINDS.items()
    if not kind.export and kind.format == "page"
]


@pytest.mark.parametrize("runs", EXPORTED, indirect=True)
@torch.no_grad()
def test_its_exported_program_returns_what_its_flow_returns(runs: Runs, tmp_path: Path) -> None:
    """The network is converted to ONNX, and compared on five rows, a number that the conversion has not seen."""
    assert runs.call("export.py", f"--format {runs.kind.format}", tmp_path) == ""
    for module in runs.kind.imports:
        import_module(module)
    flow = load_flow(runs.one)
    assert isinstance(flow, RectifiedFlow | FlowMap)
    inputs = NetworkCall(flow).example(5)
    [found] = load_program((tmp_path / MODEL_FILE).read_bytes())(inputs)
    values = {name: each.where(each != LARGEST, torch.nan) if each.is_floating_point() else each
              for name, each in inputs.items()}  # fmt: skip
    if "unknown" in values:
        values["source"] = values["source"].where(values.pop("unknown") == 0, torch.nan)
    velocity = flow.average_velocity if isinstance(flow, FlowMap) else flow.exact_velocity
    expected = velocity(**values)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (expected[1:] - expected[:-1]).abs().amax(dim=(1, 2, 3)).min() > 1e-3, "the rows differ"


@kinds("one_step")
def test_a_one_step_map_learns_from_it_or_a_sentence_says_why_not(runs: Runs, tmp_path: Path) -> None:
    if runs.kind.one_step is None:
        pytest.skip("its network takes no second time")
    flags = f"--teacher {runs.one} --teacher_samples 16 --teacher_steps 2 --global_batch_size 8 --num_samples 0"
    flags += f" --train_num_steps 2 --output_dir {tmp_path}"
    imports = ["--import", *runs.kind.imports] if runs.kind.imports else []
    [(code, errors)] = run_on_ranks(1, program, "train_mean_flow.py", [*flags.split(), *imports])
    assert code == (2 if runs.kind.one_step else 0), errors
    assert runs.kind.one_step in errors
    if not runs.kind.one_step:
        for module in runs.kind.imports:
            import_module(module)
        flow, teacher = load_flow(tmp_path), load_flow(runs.one)
        assert flow.conditions.keys() == teacher.conditions.keys() - {"augmentation"}
        assert flow.space.shape == teacher.space.shape


@kinds("load")
def test_it_is_loaded_in_python(runs: Runs) -> None:
    for module in runs.kind.imports:
        import_module(module)
    flow = load_flow(runs.one)
    document = json.loads((runs.one / "config.json").read_text())
    assert document["flow"]["network"]["kind"] == type(flow.network).__name__
    assert document["flow"]["space"]["kind"] == type(flow.space).__name__
    assert document["training"]["import"] == list(runs.kind.imports)
    if not flow.takes_source:
        samples = flow.sample(3, steps=2)
        assert samples.shape == (3, *(flow.space.medium.picture_shape or flow.space.shape or ()))
        assert samples.isfinite().all()
