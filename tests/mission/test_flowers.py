"""Flowers on several processes, and class-conditional flow matching on them: the documented commands, started for real.

All processes use the CPU. The runs are shared, as each start of a launcher takes some seconds.
"""

import json
import multiprocessing
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from rectified_flow import OxfordFlowersDataset
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import TrainConfig
from tests.launch.launching import ACCELERATE, ROOT, TRAIN, launch
from tests.programs import assert_refused, call, printed
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses, metrics

STEPS = 6
TINY = (
    "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --learning_rate 1e-3 --lr_warmup_steps 2"
    " --lr_decay cosine --log_every 1 --num_samples 4 --sample_every 3 --save_every 3"
)
SETTINGS = f"{TINY} --use_cfg --ema_decay 0.9 --train_num_steps {STEPS}"
PER_PROCESS = "--batch_size 4 --gradient_accumulation_steps 2"
LAST = f"checkpoints/step_{STEPS:08d}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mission")


@pytest.fixture(scope="module")
def conditional(runs: Path) -> tuple[Path, str]:
    """The folder and the output of a class-conditional run on two processes."""
    command = [*ACCELERATE, "--multi_gpu", "--num_processes", "2", TRAIN, *SETTINGS.split(), *PER_PROCESS.split()]
    code, output = launch([*command, "--output_dir", "conditional"], runs)
    assert code == 0, output
    return runs / "conditional", output


@pytest.fixture(scope="module")
def alone(runs: Path) -> Path:
    """The same run on one process that takes the whole batch at once."""
    words = f"{SETTINGS} --batch_size 16 --output_dir {runs / 'alone'}"
    assert run_on_ranks(1, train, read_settings(TrainConfig, "", words.split())) == [True]
    return runs / "alone"


def test_accelerate_launch_trains_to_the_end_with_previews(conditional: tuple[Path, str]) -> None:
    folder, output = conditional
    assert "2 x cpu" in output
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert sorted(path.name for path in (folder / "samples").glob("*.png")) == [
        "step_00000003.png",
        "step_00000006.png",
    ]


def test_gradient_accumulation_equals_the_larger_batch(conditional: tuple[Path, str], alone: Path) -> None:
    folder, output = conditional
    assert "4 per process x 2 processes x 2 accumulation = 16" in output
    weights, expected = (load_file(run / LAST / "model.safetensors") for run in (folder, alone))
    for name, value in expected.items():
        assert torch.linalg.vector_norm(weights[name] - value) <= 1e-3 * torch.linalg.vector_norm(value), name


def test_losses_are_gathered_and_the_schedule_counts_steps(conditional: tuple[Path, str], alone: Path) -> None:
    of_two, of_one = metrics(conditional[0]), metrics(alone)
    assert [row["loss"] for row in of_two] == pytest.approx([row["loss"] for row in of_one], rel=1e-4)
    assert [row["learning_rate"] for row in of_two] == [row["learning_rate"] for row in of_one]


def test_the_average_is_right_on_two_processes_and_after_a_resume(
    conditional: tuple[Path, str], alone: Path, runs: Path
) -> None:
    averaged, expected = (load_file(run / LAST / "ema.safetensors") for run in (conditional[0], alone))
    for name, value in expected.items():
        assert torch.linalg.vector_norm(averaged[name] - value) <= 1e-3 * torch.linalg.vector_norm(value), name
    resumed = shutil.copytree(conditional[0], runs / "resumed")
    shutil.rmtree(resumed / LAST)
    words = f"{SETTINGS} {PER_PROCESS} --resume_from_checkpoint latest --output_dir {resumed}"
    said = run_on_ranks(2, printed, words)
    assert "step 3, from" in said[0]
    assert_same_bytes(conditional[0], resumed, STEPS)
    assert losses(resumed) == losses(conditional[0])


def test_guidance_changes_samples_of_a_class(conditional: tuple[Path, str], tmp_path: Path) -> None:
    drawn = {}
    for scale in (1, 4):
        flags = f"--checkpoint {conditional[0]} --num_samples 1 --classes 2 --steps 2 --guidance_scale {scale}"
        call("sample.py", *flags.split(), "--output_dir", tmp_path / str(scale))
        with Image.open(tmp_path / f"{scale}/00000.png") as picture:
            drawn[scale] = picture.tobytes()
    assert drawn[1] != drawn[4]


def test_fp16_without_a_gpu_is_refused_in_a_sentence(tmp_path: Path) -> None:
    flags = f"{TINY} {PER_PROCESS} --use_cfg --mixed_precision fp16 --output_dir {tmp_path}"
    assert_refused("train_oxford.py", 2, flags, "--mixed_precision fp16 needs a GPU: on a CPU pass bf16 or no")


def test_mean_flow_by_the_file_of_accelerate_saves_where_it_is_told(runs: Path) -> None:
    """Checkpoints in a folder of their own, in the precision of the launcher's file."""
    launcher = [*ACCELERATE, "--config_file", str(ROOT / "accelerate_config.yaml"), "--num_processes", "2"]
    flags = f"{TINY} --batch_size 4 --train_num_steps 3 --output_dir mean --checkpoint_dir elsewhere/mean"
    code, output = launch([*launcher, str(ROOT / "train_mean_flow.py"), *flags.split()], runs)
    assert code == 0, output
    assert "2 x cpu, bf16" in output
    assert (runs / "elsewhere/mean/step_00000003/manifest.json").exists()
    assert not (runs / "mean/checkpoints").exists()
    assert (runs / "mean/samples/step_00000003.png").exists()


def test_a_run_resumes_from_its_checkpoint_dir_without_the_flag(tmp_path: Path) -> None:
    """The run's ``config.json`` records the folder, and ``--checkpoint RUN`` finds it, too."""
    run, place = tmp_path / "run", tmp_path / "elsewhere"
    flags = f"{TINY} --num_samples 0 --batch_size 4 --output_dir {run}"
    printed_by = [
        run_on_ranks(1, printed, f"{flags} {more}")[0]
        for more in (f"--train_num_steps 2 --checkpoint_dir {place}", "--train_num_steps 4")
    ]
    assert f"step 2, from {place / 'step_00000002'}" in printed_by[1]
    assert (place / "step_00000004/manifest.json").exists()
    call("sample.py", "--checkpoint", run, "--num_samples", 1, "--steps", 1, "--output_dir", tmp_path / "samples")
    assert (tmp_path / "samples/00000.png").exists()
    call("sample.py", "--checkpoint", run, "--num_samples", 1, "--steps", 1)
    assert (run / "generated/00000.png").exists(), "not beside the checkpoints"


def test_two_runs_do_not_share_a_checkpoint_dir(tmp_path: Path) -> None:
    flags = f"{TINY} --num_samples 0 --batch_size 4 --train_num_steps 1 --checkpoint_dir {tmp_path / 'shared'}"
    run_on_ranks(1, printed, f"{flags} --output_dir {tmp_path / 'a'}")
    other = f"{flags} --output_dir {tmp_path / 'b'} --dim 16"
    assert_refused("train_oxford.py", 1, other, f"has the checkpoints of {tmp_path / 'a'}: choose another")


def hub_folder(folder: Path) -> Path:
    """Write a few pictures in the layout of the hub's Oxford flowers."""
    names = datasets.ClassLabel(names=sorted(str(number) for number in range(1, 103)))
    features = datasets.Features({"image": datasets.Image(), "label": names})
    pictures = [Image.new("RGB", (8, 8), (60 * number, 0, 0)) for number in range(4)]
    table = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 2, 3]}, features=features)
    (folder / "data").mkdir(parents=True)
    table.to_parquet(folder / "data/train-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def oxford(runs: Path) -> Callable[[], OxfordFlowersDataset]:
    folder = hub_folder(runs / "oxford")
    return lambda: OxfordFlowersDataset(8, source=folder)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
def test_the_dataset_pickles_as_a_recipe(
    oxford: Callable[[], OxfordFlowersDataset], method: str, is_read: bool
) -> None:
    dataset = oxford()
    expected = [item["images"].tolist() for item in (oxford()[index] for index in range(4))]
    if is_read:
        dataset[0]
    assert len(pickle.dumps(dataset)) < 1000
    context = multiprocessing.get_context(method)
    items = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context)
    assert [item["images"].tolist() for item in items] == expected
