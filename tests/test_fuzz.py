"""Random flags of extreme values end in a sentence and never in a traceback or a hang.

``make fuzz`` tries :data:`CASES` command lines with new random numbers; the other tests run a few command lines.
"""

import importlib
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from rectified_flow.cli.model_flags import EvaluateConfig, ExportConfig, SampleConfig
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.flags import flag_types
from tests.programs import program
from tests.ranks import run_on_ranks
from train_masked_text import TextFlags
from train_point_clouds import CloudFlags

CASES = int(os.environ.get("FUZZ_CASES", "8"))
"""Number of command lines."""
TINY = "--image_size 8 --dim 8 --dim_mults 1 --batch_size 2 --sample_steps 1 --num_samples 1 --train_num_steps 1"
SMALL = "--width 32 --layers 1 --train_num_steps 1 --batch_size 4"
SAMPLE = "--checkpoint trained --num_samples 2 --steps 1"
PROGRAMS: dict[str, tuple[type, str]] = {
    "train_oxford.py": (TrainConfig, f"--dataset_path pictures --output_dir new {TINY}"),
    "train_mean_flow.py": (OneStepConfig, f"--dataset_path pictures --output_dir new {TINY}"),
    "sample.py": (SampleConfig, SAMPLE),
    "evaluate.py": (EvaluateConfig, f"{SAMPLE} --feature_network efficientnet_lite0"),
    "export.py": (ExportConfig, "--checkpoint trained"),
    "train_masked_text.py": (
        TextFlags,
        f"--text lines.txt --vocabulary 40 --length 8 --measured_lines 20 --measure_every 1 --output_dir new {SMALL}",
    ),
    "train_point_clouds.py": (CloudFlags, f"--points 10 --output_dir new {SMALL}"),
}
"""Each program with its flags, and words with which it runs for a second in the folder of :func:`sandbox`."""
PACKAGES = {"train_masked_text.py": "transformers.models.bert.modeling_bert", "train_point_clouds.py": "sklearn"}
"""The package that each example imports while it runs; those of other programs are imported once for all cases."""
SLOW = ("open", "compile", "import", "config")
"""Flags that are not tried: they start a browser or a compiler, or have tests of their own."""
SLOW_VALUES = ("trackio", "wandb", "inception", "spawn", "forkserver")
MEMORY, SECONDS = 4 * 2**30, 5.0
"""Memory that a case may allocate [bytes], and the time after which it gets a SIGTERM [s]."""

INTEGERS = ("0", "1", "-1", "3", "7", "2147483648", "18446744073709551616", "1" + "0" * 30, "1.5", "nan", "٣", "x")
NUMBERS = ("0", "-0.0", "1", "0.5", "1e-320", "1e300", "-1", "nan", "inf", "-inf", "1e400", "1_0", "x")
WORDS = ("x", "-", "1:1", "0:1", "🙂", "a" * 5000, "%s", "../x", "trained", "A=1", "\udcff", "all", "0", "1,2")
PATHS = (
    *("missing", "missing/deeper", "file.txt", "empty", "pictures", "trained", "pipe", "dangling", "circle", "trained"),
    *("/dev/null", "/dev/zero", "x" * 300, "~nobody/x", "\udcff", "file.txt/below", "trained/config.json", "noise.png"),
    *("lines.txt", "words.txt"),
)


def type_of(hint: Any) -> Any:
    """A type without bounds and other metadata."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def values(hint: Any) -> st.SearchStrategy[list[str]]:
    """Words that a flag of this type may be given, good ones and bad ones."""
    hint = type_of(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return values(next(each for each in arguments if each is not type(None)))
    if origin is Literal:
        return st.sampled_from([*(each for each in arguments if each not in SLOW_VALUES), "x"]).map(
            lambda one: [str(one)]
        )
    if origin is tuple:
        return st.lists(values(arguments[0]).map(lambda words: words[0]), min_size=0, max_size=3)
    words = {int: INTEGERS, float: NUMBERS, Path: PATHS}.get(hint, WORDS)
    return st.sampled_from(words).map(lambda one: [one])


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[str, list[str]]:
    """A program and its words: those with which it runs, and one to four random flags."""
    script = draw(st.sampled_from(sorted(PROGRAMS)))
    config_class, base = PROGRAMS[script]
    kinds = {name: type_of(kind) for name, kind in flag_types(config_class).items() if name not in SLOW}
    words = base.split()
    for name in draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4, unique=True)):
        if kinds[name] is bool:
            words.append(draw(st.sampled_from([f"--{name}", f"--no_{name}"])))
        elif name == "runs":
            words += [word for word in draw(values(kinds[name])) if not word.startswith("-")]
        else:
            words += [f"--{name}", *draw(values(kinds[name]))]
    return script, words


def sandbox(folder: Path, trained: Path) -> None:
    """Make a current folder in which the paths of :data:`PATHS` are what their names say."""
    shutil.copytree(trained, folder, symlinks=True)
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("some text")
    (folder / "lines.txt").write_text("the sun and a sea\n" * 80)
    (folder / "words.txt").write_text("sun sun\n[MASK] \n  \n" * 40)
    (folder / "dangling").symlink_to("missing too")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    os.chdir(folder)


def run_limited(folder: Path, trained: Path, script: str, words: list[str]) -> Any:
    """Run a program in a folder of its own with limits of memory and time; returns its exit code and stderr."""
    sandbox(folder, trained)
    if script in PACKAGES:
        importlib.import_module(PACKAGES[script])
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    timer = threading.Timer(SECONDS, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        return program(script, words, {"WANDB_MODE": "offline", "HOME": str(folder)})
    finally:
        timer.cancel()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``pictures`` in two classes, the run ``trained`` on them, and ``noise.png``."""
    folder = tmp_path_factory.mktemp("fuzz")
    for number in range(8):
        picture = folder / "pictures" / "ab"[number % 2] / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 30, 255 - number * 30, 100)).save(picture)
    Image.effect_noise((8, 8), 50).save(folder / "noise.png")
    words = f"--dataset_path {folder}/pictures --output_dir {folder}/trained --use_cfg --holdout 0 {TINY}"
    assert run_on_ranks(1, program, "train_oxford.py", words.split())[0][0] == 0
    return folder


def assert_in_words(result: tuple[int, str]) -> None:
    code, text = result
    assert code in (0, 1, 2), text
    # Python itself prints one if the signal of the timer arrives within a callback of its garbage collector.
    assert text.count("Traceback") == text.count("Exception ignored in"), text


tried = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="FUZZ_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@tried
@given(call=calls())
def test_flags_of_extreme_values(trained: Path, tmp_path_factory: pytest.TempPathFactory, call: Any) -> None:
    folder = tmp_path_factory.mktemp("case") / "sandbox"
    assert_in_words(run_on_ranks(1, run_limited, folder, trained, *call)[0])
