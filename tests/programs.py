"""Run the scripts inside this process, as a rank of :func:`tests.ranks.run_on_ranks` or alone."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState
from PIL import Image
from torch import Tensor

from rectified_flow.cli import programs, timing
from rectified_flow.cli.data import build_space
from rectified_flow.cli.evaluate import evaluate
from rectified_flow.cli.export import export
from rectified_flow.cli.model_flags import EvaluateConfig, ExportConfig, SampleConfig
from rectified_flow.cli.planning import choices, facts
from rectified_flow.cli.record import with_record
from rectified_flow.cli.sample import sample
from rectified_flow.cli.settings import Settings, parse, read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.evaluation import distances, scores
from rectified_flow.export import onnx
from rectified_flow.exportable import Exportable
from rectified_flow.training.clock import Clock
from rectified_flow.training.speed import Speed
from tests.ranks import run_on_ranks

PROGRAMS: dict[str, Callable[[], None]] = {
    "train_oxford.py": programs.train_oxford,
    "train_mean_flow.py": programs.train_mean_flow,
    "sample.py": programs.sample,
    "evaluate.py": programs.evaluate,
    "export.py": programs.export,
    "train_masked_text.py": partial(programs.run, "train_masked_text:train", "train_masked_text:TextFlags", ""),
    "train_wan.py": partial(programs.run, "train_wan:train", "train_wan:WanFlags", ""),
    "train_point_clouds.py": partial(programs.run, "train_point_clouds:train", "train_point_clouds:CloudFlags", ""),
}


FUNCTIONS: dict[str, tuple[Callable[..., object], type]] = {
    "sample.py": (sample, SampleConfig),
    "evaluate.py": (evaluate, EvaluateConfig),
    "export.py": (export, ExportConfig),
}
MEASURED = facts.training_speed


@contextmanager
def constant_speed(rate: float = 300.0, *, measured: bool = False, timed: bool = False) -> Iterator[None]:
    """Let each process train ``rate`` images/s in plans, independently of the machine's load.

    If ``measured``, the plan also measures its speed, and uses only whether the measurement was possible. Unless
    ``timed``, a run has as many steps as its plan, however long they take.
    """

    def speed(*flags: Any) -> Speed:
        return Speed(PartialState().num_processes * rate if not measured or MEASURED(*flags).rate else 0.0)

    with patch.object(facts, "training_speed", speed), ExitStack() as patched:
        if not timed:
            patched.enter_context(patch.object(timing, "seconds_since", lambda _began: 0.0))
            patched.enter_context(patch.object(Clock, "tick", lambda *_: False))
            patched.enter_context(patch.object(Clock, "used_before", lambda *_, **__: 0.0))
        yield


def frechet_of_few(real: Tensor, generated: Tensor) -> float:
    """Compute the squared Fréchet distance of few features ``[n, d]`` and ``[m, d]``, in milliseconds.

    The trace of the root of the product of both covariances is the sum of the singular values of a matrix ``[n, m]``.
    The eigenvalues of a matrix ``[d, d]``, which the program computes, take a second for 1,280 features.
    """
    sets = [each.double() for each in (real, generated)]
    one, other = ((each - each.mean(dim=0)) / (len(each) - 1) ** 0.5 for each in sets)
    apart = (sets[0].mean(dim=0) - sets[1].mean(dim=0)).square().sum()
    root = torch.linalg.svdvals(one @ other.T).sum()
    return float(apart + one.square().sum() + other.square().sum() - 2 * root)


@contextmanager
def quick_frechet_distance() -> Iterator[None]:
    """Compute Fréchet distances by :func:`frechet_of_few`."""
    name = "frechet_distance"
    with patch.object(distances, name, frechet_of_few), patch.object(scores, name, frechet_of_few):
        yield


@contextmanager
def stand_in() -> Iterator[None]:
    """Replace the exported program of export.py by zeros, to save tracing; a loaded program calls the flow itself."""
    calls: list[Any] = []

    def to_onnx(exported: Exportable, *, half: bool) -> bytes:
        calls.append(exported.module)
        return bytes(100_000)

    def load(_content: bytes) -> Callable[[dict[str, Any]], list[Any]]:
        def run(inputs: dict[str, Any]) -> list[Any]:
            returned = calls[-1](**inputs)
            return [*returned] if isinstance(returned, tuple) else [returned]

        return run

    with patch.object(onnx, "to_onnx", to_onnx), patch.object(onnx, "load_program", load):
        yield


class Sizes(ImageSource):
    """A source of which a recipe reads the sizes of the pictures only."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("1", self.sizes[index]), -1


class OwnPictures(Sizes, FileFolder):
    """Pictures of a folder, of which only the sizes are read."""


def planned(settings: Settings[TrainConfig], count: int, rate: Callable[[TrainConfig], float]) -> TrainConfig:
    """Return the flags of a planned run on a machine that trains at ``rate(flags)`` images per second."""
    settings, has_begun = with_record(settings)
    if has_begun:
        return settings.values
    speed = lambda tried, *_: Speed(rate(tried.values))  # noqa: E731
    with (
        patch.object(choices, "speed_of", speed),
        patch.object(timing, "seconds_since", lambda _began: 0.0),
        patch.object(facts, "is_bf16_faster", lambda: True),
    ):
        values = settings.values
        has_length = "train_num_steps" in settings.fixed
        time = timing.budget_of(values.program) if values.is_planned and not has_length else None
        if values.is_planned and values.teacher.teacher is None:
            settings = choices.with_recipe(settings, Sizes([(256, 256)] * count), time)
        space = build_space(settings.values.data)
        if time is None:
            facts.print_speed(values.run, choices.speed_of(settings), count)
            return settings.resolving(facts.short_warm_up(settings.values.run, count, settings.given)).values
        return choices.with_plan(settings, time, count, {}, space)[0].values


def without(flag: str, words: list[str]) -> list[str]:
    """Return the words of a command line without a list, which must not be given twice."""
    if flag not in words:
        return words
    at = words.index(flag)
    end = next((place for place in range(at + 1, len(words)) if words[place].startswith("--")), len(words))
    return words[:at] + words[end:]


def program(name: str, argv: list[str], variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a script; returns its exit code and what it wrote to stderr. It must not end well on several ranks."""
    os.environ.update(variables or {})
    sys.argv = [name, *argv]
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        code = 0
        try:
            PROGRAMS[name]()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        sys.stderr.flush()
        output.seek(0)
        return code, output.read().decode()


def call(name: str, *flags: object) -> None:
    """Run the function that a script calls, in this process."""
    function, config = FUNCTIONS[name]
    sys.argv = [name, *map(str, flags)]
    function(parse(config, ""))


def printed(words: str) -> str:
    """Return what train_oxford.py prints on this rank for these flags."""
    with redirect_stdout(StringIO()) as output:
        train(read_settings(TrainConfig, "", words.split()))
    return output.getvalue()


def quick_program(name: str, argv: list[str]) -> tuple[int, str]:
    """Run a script like :func:`program`, without its slow parts that write no file of their own.

    The exported program is the :func:`stand_in`, which is larger than the space left on a full disk.
    """
    with constant_speed(), stand_in(), quick_frechet_distance():
        return program(name, argv)


def refusal(name: str, argv: list[str]) -> str:
    """Return the sentence by which a script refuses its flags, in this process."""
    arguments = patch.object(sys, "argv", [name, *argv])
    with arguments, redirect_stderr(StringIO()) as said, pytest.raises(SystemExit) as end:
        PROGRAMS[name]()
    assert end.value.code == 2, said.getvalue()
    assert "Traceback" not in said.getvalue()
    return said.getvalue()


def assert_refused(name: str, world_size: int, flags: str, *expected: str, **variables: str) -> None:
    """The script, with these variables set, must end on every rank with code 2, and rank 0 says what is expected."""
    if world_size == 1 and not variables:
        said = refusal(name, flags.split())
    else:
        results = run_on_ranks(world_size, program, name, flags.split(), variables)
        assert [code for code, _ in results] == [2] * world_size, results
        assert "Traceback" not in "".join(text for _, text in results)
        said = results[0][1]
    for words in expected:
        assert said.count(words) == 1, said
