"""Tests of the custom parts of this folder, beyond the programs of tests/contract."""

import json
import re
import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

from rectified_flow import register
from rectified_flow.load import load_flow
from tests.contract.kinds import KINDS, SCHEDULE, Runs, words
from tests.extension.own_sounds import read_sound
from tests.programs import assert_refused, program
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
GUESTS = {name: kind for name, kind in KINDS.items() if kind.imports}
UNNAMED = ("own pictures", "own optimizer", "own metric", "own degradation", "own format")
"""Guests that no checkpoint names, so that sampling works without them."""


def test_the_table_of_the_documentation_has_these_parts() -> None:
    """Each row: the part, what is registered, the flag that chooses it, and files of this folder."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = re.search(r"## A new part: one file.*?(\n\|.*?)\n\n", page, re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table[1].strip().splitlines()[2:]]
    flags = {guest: flag.split("`")[1] for *_, flag, files in rows for guest in re.findall(r"\[(\w+)\.py\]", files)}
    words = {
        kind.imports[0].split(".")[-1]: f"{kind.flags} --metric {kind.metrics} --format {kind.format}".replace(
            "--format page", ""
        )
        for kind in GUESTS.values()
    }
    assert flags.keys() == words.keys()
    assert [guest for guest, flag in flags.items() if f"{flag} " not in words[guest]] == []


@pytest.mark.parametrize("name", GUESTS)
def test_without_its_module_the_kind_is_named(name: str, kind_runs: Callable[[str], Runs], tmp_path: Path) -> None:
    flags = ["--checkpoint", str(kind_runs(name).one), "--num_samples", "1", "--output_dir", str(tmp_path)]
    [(code, errors)] = run_on_ranks(1, program, "sample.py", flags)
    if name in UNNAMED:
        assert code == 0, errors
        return
    assert code == 2
    assert "pass --import with its module" in errors
    assert errors.count("\n") == 1


@register(role="network")
class WithoutIntervals(nn.Module):
    """A network that takes any conditions, and ignores the end of an interval."""

    def forward(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(("script", "flags"), [("train_mean_flow.py", ""), ("train_oxford.py", "--one_step")])
@pytest.mark.parametrize("network", ["PointNetwork width=16", "WithoutIntervals"])
def test_a_network_without_the_end_of_an_interval_is_no_generator_in_one_step(
    script: str, flags: str, network: str, tmp_path: Path
) -> None:
    """Refused before the first of both runs of ``--one_step``, too."""
    words = f"--import tests.extension.own_space --network {network} {flags} --output_dir {tmp_path}/run"
    assert_refused(script, 1, words, f"--network {network.partition(' ')[0]} has no input r")
    assert not (tmp_path / "run").exists()


def test_a_network_without_conditions_trains_on_few_pictures_without_augmentation(
    kind_runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    flags = f"--dataset_path {kind_runs('pictures').data}/pictures --image_size 8 --output_dir {tmp_path}/run"
    flags += " --import tests.extension.own_adapter --network Adapted width=8 --train_num_steps 1 --num_samples 0"
    [(code, errors)] = run_on_ranks(1, program, "train_oxford.py", flags.split())
    assert code == 0, errors
    assert json.loads((tmp_path / "run/config.json").read_text())["training"]["augment"] == 0


@pytest.mark.parametrize(
    ("kind", "flags", "flag", "condition"),
    [
        ("pictures", "pictures --augment 0.1", "augment", "augmentation"),
        ("pictures", "pictures --use_cfg", "use_cfg", "labels"),
        ("columns", "columns --condition_on size", "condition_on", "size"),
        ("pictures", "pictures --degrade grey", "degrade", "source"),
        ("paired", "to --source_path {data}/from --source_as condition", "source_as", "source"),
    ],
)
def test_conditions_that_a_network_does_not_take_are_refused(
    kind: str, flags: str, flag: str, condition: str, kind_runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    data = f"--dataset_path {{data}}/{flags} --image_size 8".format(data=kind_runs(kind).data)
    network = "--import tests.extension.own_adapter --network Adapted width=8 --train_num_steps 1"
    expected = f"--{flag} has no effect: Adapted takes no condition {condition}; leave it out"
    assert_refused("train_oxford.py", 1, f"{data} {network} --output_dir {tmp_path}/run", expected)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "flags", "refused"),
    [
        ("own flow", "--from_images {data}/start.png", True),
        ("own space", "--from_images {data}/start.png", True),
        ("own network", "--from_images {data}/start.png", False),
    ],
)
def test_ways_of_sampling_that_it_does_not_have_are_refused(
    name: str, flags: str, refused: bool, kind_runs: Callable[[str], Runs], tmp_path: Path
) -> None:
    runs = kind_runs(name)
    Image.new("RGB", (8, 8)).save(runs.data / "start.png")
    assert bool(runs.call("sample.py", f"--num_samples 2 {flags}", tmp_path)) == refused


def test_a_format_has_its_own_options_and_no_others(kind_runs: Callable[[str], Runs], tmp_path: Path) -> None:
    runs = kind_runs("own format")
    sizes = []
    for flags in ("", "compressed=true"):
        assert runs.call("export.py", f"--format arrays {flags}", tmp_path / (flags or "plain")) == ""
        sizes.append((tmp_path / (flags or "plain") / "arrays.npz").stat().st_size)
    with np.load(tmp_path / "plain/arrays.npz") as arrays:
        expected = load_flow(runs.one).network.state_dict()
        assert {name: arrays[name].tolist() for name in arrays} == {
            name: each.tolist() for name, each in expected.items()
        }
    assert sizes[1] < sizes[0]
    for flags, sentence in (
        ("--format arrays --half", "--half has no effect: arrays does not ask for half"),
        ("--format arrays --open", "--open has no effect: the format arrays has no page"),
        ("--format arrays half=true", "arrays takes KEY=VALUE"),
        ("--format array", "--format array is not registered: choose arrays or onnx or page"),
    ):
        assert sentence in runs.call("export.py", flags, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@pytest.fixture
def runs(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("own sounds")


def test_samples_start_from_sounds(runs: Runs, tmp_path: Path) -> None:
    first = min(runs.data.glob("sounds/*.wav"))
    flags = f"--num_samples 2 --steps 2 --from_images {first} --strength 0.5"
    assert runs.call("sample.py", flags, tmp_path) == ""
    rate, samples = read_sound(tmp_path / "00001.wav")
    assert (rate, len(samples)) == (read_sound(first)[0], 7 * 4)
    assert samples.std() > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--augment 0.1", "--augment has no effect on Spectrograms"),
        ("--image_size 0", "--image_size 0 is for pictures"),
        ("--dataset_path {data}/mixed", "z.wav (it has 16000 samples a second, not"),
    ],
)
def test_what_it_does_not_have_is_refused(runs: Runs, tmp_path: Path, flags: str, sentence: str) -> None:
    shutil.copytree(runs.data / "sounds", tmp_path / "mixed")
    with wave.open(str(tmp_path / "mixed/z.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(800))
    given = f"{runs.kind.flags.format(data=runs.data)} {SCHEDULE.replace('--augment 0', '')} {flags}"
    line = words(runs.kind, given, tmp_path, tmp_path / "x")
    [(code, errors)] = run_on_ranks(1, program, "train_oxford.py", line)
    assert code == 2
    assert sentence in errors
    assert "Traceback" not in errors
