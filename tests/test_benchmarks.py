"""The benchmarks: whose turn it is, where the table goes, and that each one still runs."""

import copy
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.io import write_png

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from turns import Times, Turns, ratio, take_turns

from rectified_flow import randomness
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training.state import TrainingState
from tests.patience import PATIENCE

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def work(seconds: float, log: Path, turns: Turns) -> None:
    """Keep the processor busy, and write down whose turn it was."""
    turns.facts["name"] = f"{seconds:g}"
    while True:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
        with log.open("a") as file:
            file.write(f"{seconds:g} ")
        turns.done(work=10)


def leave(turns: Turns) -> None:
    turns.done()


@pytest.mark.slow
def test_turns_alternate_and_are_timed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    times = take_turns({"short": partial(work, 0.02, log), "long": partial(work, 0.06, log)}, rounds=2, pieces=2)
    assert log.read_text().split() == ["0.02", "0.06", *["0.02"] * 2, *["0.06"] * 4, *["0.02"] * 2]
    assert [len(each.seconds) for each in times.values()] == [2, 2]
    assert times["long"].facts == {"name": "0.06"}
    assert 0.006 <= times["long"].median < 0.02, "a unit of ten"
    assert 2 < ratio(times["long"], times["short"]).median < 4


def test_who_leaves_early_is_named() -> None:
    with pytest.raises(RuntimeError, match="deserter ended too early"):
        take_turns({"deserter": leave}, rounds=2)


def test_ratios_are_of_rounds() -> None:
    """A slow moment of the machine, in which both took ten times as long, is not seen."""
    assert str(ratio(Times([2, 20, 3], {}), Times([1, 10, 1], {}))) == "2.00 [2.00, 3.00]"


def test_a_machines_table_takes_the_place_of_its_last(tmp_path: Path) -> None:
    from bench import write_table

    page = tmp_path / "README.md"
    page.write_text("# Benchmarks\n\nText.\n")
    write_table("card (8 GB)", "| old |", page)
    write_table("processor", "| other |", page)
    write_table("card (8 GB)", "| new |", page)
    assert page.read_text() == "# Benchmarks\n\nText.\n\n## card (8 GB)\n\n| new |\n\n## processor\n\n| other |\n"


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.py")))
def test_every_benchmark_imports(name: str) -> None:
    """Without the peer, which only ``pip install -e .[benchmark]`` brings."""
    importlib.import_module(name)


@pytest.mark.slow
def test_a_tiny_table_of_the_parts_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import step_parts

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECTIFIED_FLOW_CACHE", str(tmp_path))
    rows = step_parts.measure_rows(step_parts.Flags(image_size=8, dim=8, batch_size=2, rounds=1))
    assert len(rows) == 6
    assert {row.against for row in rows} == {step_parts.PLAIN, step_parts.STEPS}


@pytest.mark.slow
def test_a_tiny_comparison_of_mean_flow_steps() -> None:
    import mean_flow

    [row] = mean_flow.measure_rows(mean_flow.Flags(image_size=8, batch_size=2, dim=8, rounds=1))
    assert row.against == "rectified flow step"


def verdicts(output: str) -> dict[str, str]:
    """The verdict of each check in what first_gpu.py printed, between its first and its last line."""
    return {name: verdict for verdict, name, *_ in map(str.split, output.splitlines()[1:-1])}


@pytest.mark.slow
def test_the_first_run_on_a_gpu_passes_on_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    import first_gpu

    assert first_gpu.main(first_gpu.Flags(tiny=True)) == 0
    found = verdicts(capfd.readouterr().out)
    assert list(found) == list(first_gpu.CHECKS)
    for name, check in first_gpu.CHECKS.items():
        assert found[name] in (("skip",) if check.needs_gpu else ("pass", "figure")), name
    assert {"rectified-float32", "mean-bf16", "resume", "two-ranks", "compiled-mean"} <= {
        name for name, verdict in found.items() if verdict == "pass"
    }


def spoil_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import first_gpu

    def to_another_device(module: nn.Module, *_: object) -> nn.Module:
        with torch.no_grad():
            next(module.parameters()).mul_(1.1)
        return module

    monkeypatch.setattr(first_gpu, "to_device", to_another_device)


def forget_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingState, "_load_moments", lambda *_: None)


def end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TrainingState, "update_averages")


@pytest.mark.parametrize(
    ("check", "fault"),
    [("mean-float32", spoil_weights), ("resume", forget_moments), ("repeat", end_training)],
    ids=["wrong number", "lost state", "error"],
)
def test_a_fault_fails_on_a_first_run(
    check: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import first_gpu

    fault(monkeypatch)
    assert first_gpu.main(first_gpu.Flags(tiny=True, only=(check,))) == 1
    output = capfd.readouterr().out
    assert verdicts(output) == {check: "FAIL"}
    assert output.endswith(f"1 failed: {check}\n")


def test_a_first_run_names_what_its_time_was_too_short_for(capfd: pytest.CaptureFixture[str]) -> None:
    import first_gpu

    assert first_gpu.main(first_gpu.Flags(minutes=0.1, only=("preview", "compiled-mean"))) == 0
    output = capfd.readouterr().out
    assert verdicts(output) == {"preview": "skip", "compiled-mean": "skip"}
    assert "--only compiled-mean" in output


@pytest.mark.slow
def test_launches_are_counted_without_a_gpu() -> None:
    """In a process of its own: it pretends that there is one."""
    command = [sys.executable, str(BENCHMARKS / "launches.py"), "--tiny", "--flows", "rectified flow"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    launches, kernels, calls, gigabytes = (float(each) for each in done.stdout.splitlines()[-1].split("|")[2:-1])
    assert launches == kernels + calls
    assert 40 < calls < kernels, "a network of one level has some 25 layers, each with a gradient"
    assert 1 < gigabytes < 4


def test_score_augmentation_turns_moves_and_scales_noise_and_picture_alike() -> None:
    from score_augmentation import TOLD, ScoreAugmented, transformed

    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    one, zero = torch.ones(1), torch.zeros(1)
    assert torch.equal(transformed(x, one, zero, torch.zeros(1, 2)), x)
    assert torch.equal(transformed(x, zero, one, torch.zeros(1, 2)), x.rot90(1, (2, 3)))
    assert torch.equal(transformed(x, one, zero, torch.tensor([[1.0, 0.0]])), F.pad(x, (0, 1))[..., 1:])

    flow = ScoreAugmented(Unet(4, (1,), conditions=TOLD, image_size=8, attention_sides=()), 0.5, space=Pixels())
    pictures = torch.rand(64, 3, 8, 8) * 2 - 1
    with randomness.deterministic(randomness.Samples(0, range(64))):
        x_0, noise, conditions = flow.draw_batch({"images": pictures})
        plain, _, _ = RectifiedFlow(flow.network, space=Pixels()).draw_batch({"images": pictures})
    told = conditions["augmentation"]
    alone = (told == 0).all(dim=1)
    assert 0.05 < alone.float().mean() < 0.3, "an eighth of the rows, and some quarter turns by nothing"
    assert torch.equal(x_0[alone], plain[alone])
    assert (x_0[~alone] != plain[~alone]).flatten(1).any(dim=1).all()
    assert torch.equal(x_0 == 0, noise == 0), "what a shift leaves behind is empty in both"


def test_a_second_head_and_a_warm_up_start_as_the_default() -> None:
    """A network that knows no intervals yet predicts the velocity with either head, so that only its loss is added."""
    from one_step_flows import StudyFlow

    torch.manual_seed(0)
    network = Unet(4, (1, 2), image_size=8, attention_sides=())
    nn.init.normal_(network.conv_out.weight, std=0.1)
    x_0, noise, t = torch.rand(6, 3, 8, 8), torch.randn(6, 3, 8, 8), torch.linspace(0.1, 1, 6)

    def loss(**settings: Any) -> tuple[float, Tensor]:
        copied = copy.deepcopy(network)
        flow = StudyFlow(copied, **settings).train()
        flow.progress = 0.5
        value = flow.loss(x_0, noise, t, t / 2, {}, 3)[0]
        value.backward()
        gradient = copied.conv_in.weight.grad
        assert gradient is not None
        return float(value.detach()), gradient

    plain, plain_gradient = loss()
    assert loss(warms=True)[0] == plain, "the derivative has its whole weight from half of the training on"
    of_velocity = StudyFlow(network).weighted(
        network(torch.lerp(x_0, noise, t[:, None, None, None]), t) - (noise - x_0)
    )
    both, gradient = loss(two_heads=True)
    assert both == pytest.approx(plain + float(of_velocity[0].detach()), rel=1e-5)
    assert not torch.allclose(gradient, plain_gradient), "both heads are learned"


def test_matching_moves_what_is_drawn_to_the_teacher() -> None:
    """Nothing moves where the critic has the teacher's velocity; where it has a larger one, pictures were too low."""
    from one_step_flows import StudyFlow

    torch.manual_seed(0)
    network = Unet(4, (1, 2), image_size=8, attention_sides=())
    nn.init.normal_(network.conv_out.weight, std=0.1)
    flow = StudyFlow(network, teacher=copy.deepcopy(network), matching=0.5, pull=1.0, paths=torch.zeros(1, 3, 3, 8, 8))
    critic, noise = flow.critic, torch.randn(4, 3, 8, 8)
    assert isinstance(critic, Unet)
    of_drawn, of_critic = network.conv_out.bias, critic.conv_out.bias
    assert of_drawn is not None
    assert of_critic is not None
    for shift in (0.0, 0.1):
        nn.init.constant_(of_critic, shift)
        flow.logged = {}
        flow.zero_grad()
        flow._match(noise).backward()
        assert of_drawn.grad is not None
        assert of_critic.grad is not None
        assert of_critic.grad.abs().max() > 0, "the critic always learns"
        assert (of_drawn.grad > 0).all() if shift else (of_drawn.grad == 0).all(), "a lower u draws higher pictures"


def test_a_study_is_resumed_and_its_table_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import one_step_study
    from one_step_study import Case, Flags, measure, print_table

    (tmp_path / "pictures").mkdir()
    for index in range(8):
        write_png(torch.full((3, 32, 32), 30 * index, dtype=torch.uint8), str(tmp_path / f"pictures/{index}.png"))
    names = ("rectified", "lagrangian, shares, power 0, taught")
    flags = Flags(
        factors=names,
        data=str(tmp_path / "pictures"),
        seeds=(0,),
        images=8,
        dim=4,
        num_samples=2,
        output_dir=tmp_path,
        results=tmp_path / "results.jsonl",
    )
    for name in (*names, names[0]):
        measure(Case(name, 0, flags))
    assert flags.results.read_text().count("\n") == 2, "what is there is not measured again"
    print_table(flags)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows[2:]] == list(names)
    columns = len(one_step_study.CALLS) + 1
    assert all(row[6].strip() == "" and float(row[5]) > 0 for row in rows[2:3]), "a rectified flow needs no control"
    assert all(float(cell) >= 0 for cell in rows[3][2 : 2 + columns])
