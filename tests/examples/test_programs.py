"""The examples, started as a person starts them."""

import random
import sys
from pathlib import Path

import pytest

from tests.launch.test_programs import finish, launch, start
from tests.patience import wait_for
from tests.training.runs import losses

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 60
RUN = f"--train_num_steps {STEPS} --save_every 5 --log_every 5 --batch_size 4 --measure_every 20"
TINY = {
    "text/train_masked_text.py": (
        "--text lines.txt --vocabulary 40 --length 8 --width 32 --layers 1 --measured_lines 20"
    ),
    "clouds/train_point_clouds.py": "--geometry torus --points 10 --width 32 --layers 1 --measured_clouds 10",
}


@pytest.mark.slow
@pytest.mark.parametrize("example", list(TINY))
def test_a_killed_run_goes_on_as_if_nothing_had_been(example: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = (" ".join(draw.choices(["sun", "sea", "sky", "cat", "dog"], k=6)) for _ in range(400))
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    command = [sys.executable, str(EXAMPLES / example), *TINY[example].split(), *RUN.split(), "--output_dir"]
    killed, straight = start([*command, "killed"], tmp_path), start([*command, "straight"], tmp_path)
    saved = tmp_path / "killed/checkpoints/step_00000025"
    wait_for("step 25", lambda: saved.exists() or killed.poll() is not None)
    killed.kill()
    _, output = finish(killed)
    assert f"checkpoint  killed/checkpoints/step_{STEPS:08}" not in output, "it came to its end"
    code, output = launch([*command, "killed", "--resume", "auto"], tmp_path)
    assert code == 0, output
    assert "resume      step" in output
    assert finish(straight)[0] == 0
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        one, other = (tmp_path / run / f"checkpoints/step_{STEPS:08}" / name for run in ("straight", "killed"))
        assert one.read_bytes() == other.read_bytes(), name
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    measured = "accuracy.jsonl" if "text" in example else "distances.jsonl"
    assert (tmp_path / "killed" / measured).read_text() == (tmp_path / "straight" / measured).read_text()


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("text/train_masked_text.py", "tokenizers"),
        pytest.param("clouds/train_point_clouds.py", "sklearn", marks=pytest.mark.slow),
    ],
)
def test_a_package_that_is_missing_is_named(example: str, package: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("sun and sea\n" * 60)
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(name={package!r})")
    command = [sys.executable, str(EXAMPLES / example), *TINY[example].split()]
    code, output = launch(command, tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 2
    assert f"error: the Python package {package} is not installed" in output
    assert "Traceback" not in output
