"""Text lines, point clouds and Wan as their users start them: the documented launchers, on two processes of the CPU.

The other promises of these examples are tested in ``tests/examples``, where runs start in a fraction of the time.
"""

import json
import sys
from pathlib import Path

from tests.examples.wan.tiny_clips import save_clips
from tests.examples.wan.tiny_wan import save_pipeline
from tests.launch.launching import BIN, ROOT, launch
from tests.training.runs import losses


def state_of(run: Path) -> str:
    return str(json.loads((run / "status.json").read_text())["state"])


def test_text_lines_by_torchrun(tmp_path: Path) -> None:
    lines = "".join(f"the sun sees a cat number {number % 7}\n" for number in range(200))
    (tmp_path / "corpus.txt").write_text(lines)
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"]
    flags = "--text corpus.txt --output_dir run --max_train_samples 100 --batch_size 32 --vocabulary 60 --length 8"
    flags += " --width 32 --layers 1 --train_num_steps 2 --measured_lines 5 --log_every 1 --lr_warmup_steps 0"
    program = str(ROOT / "examples/text/train_masked_text.py")
    code, output = launch([*command, program, *flags.split()], tmp_path)
    assert code == 0, output
    assert "32 per process x 2 processes = 64" in output
    assert list(losses(tmp_path / "run")) == [1, 2]
    assert state_of(tmp_path / "run") == "finished"


def test_point_clouds_by_torch_distributed_launch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port=29571"]
    flags = "--geometry torus --point_coupling drawn --points 8 --width 32 --layers 1 --batch_size 8 --num_epochs 0.02"
    flags += " --num_samples 2 --sample_steps 1 --measured_clouds 10 --log_every 1 --output_dir run"
    program = str(ROOT / "examples/clouds/train_point_clouds.py")
    code, output = launch([*command, program, *flags.split()], tmp_path)
    assert code == 0, output
    assert "2 x cpu" in output
    run = tmp_path / "run"
    assert state_of(run) == "finished"
    assert list((run / "samples").glob("*.png"))
    assert (run / "distances.jsonl").exists()


def test_wan_by_its_script(tmp_path: Path) -> None:
    """The documented command, with the flags of a tiny model and clip."""
    save_pipeline(tmp_path / "model", "tokens")
    (tmp_path / "clips").mkdir()
    save_clips(tmp_path / "clips")
    flags = "--dataset_path clips --batch_size 1 --num_epochs 1 --learning_rate 1e-4 --num_workers 1"
    flags += " --checkpoint_dir checkpoints/2gpu --model model --frames 9 --height 32 --width 32 --lora_rank 4"
    flags += " --num_samples 0 --output_dir run"
    code, output = launch([str(ROOT / "scripts/train_multigpu.sh"), "2", *flags.split()], tmp_path)
    assert code == 0, output
    assert "1 per process x 2 processes" in output
    assert state_of(tmp_path / "run") == "finished"
    assert list((tmp_path / "checkpoints/2gpu").glob("step_*/manifest.json"))
    assert (tmp_path / "run/pytorch_lora_weights.safetensors").exists()
