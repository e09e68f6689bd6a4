"""Tests of the command line: flags from a file, imported modules, help, and parts chosen by their names."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.data import build_space
from rectified_flow.cli.model_flags import EvaluateConfig, ExportConfig, SampleConfig
from rectified_flow.cli.programs import PROGRAMS
from rectified_flow.cli.settings import import_modules, parse
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import flag_types, recorded
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [TrainConfig, OneStepConfig, SampleConfig, EvaluateConfig, ExportConfig]
FLAGS: dict[str, Any] = {
    "dataset_path": "pictures",
    "dim_mults": [1, 2],
    "use_cfg": True,
    "ema_decay": 0.5,
    "learning_rate": 0.5,
    "num_epochs": 2.5,
    "train_num_steps": None,
    "seed": 3,
}


def parse_rectified(words: str) -> TrainConfig:
    return parse(TrainConfig, "Train a flow.", words.split())


def built(words: str) -> Any:
    values = parse_rectified(f"--image_size 8 --dim 8 {words}")
    return build_flow(values, {}, build_space(values.data))


def write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("form", ["of a program", "flags alone"])
def test_flags_come_from_a_file_and_those_given_override_them(tmp_path: Path, form: str) -> None:
    documents: dict[str, dict[str, Any]] = {
        "of a program": {"data": {}, "flow": {}, "training": FLAGS | {"network": ["Unet"]}},
        "flags alone": FLAGS,
    }
    file = write(tmp_path / "config.json", documents[form])
    config = parse_rectified(f"--config {file} --seed 4 --learning_rate 0.25 --ema_decay 0.75")
    assert (config.run.seed, config.run.learning_rate, config.run.ema_decay) == (4, 0.25, 0.75)
    assert (config.run.num_epochs, config.run.train_num_steps) == (2.5, None)
    same = parse_rectified(f"--config={file}")
    assert (same.run.seed, same.run.learning_rate, same.run.ema_decay) == (3, 0.5, 0.5)
    assert (config.data.dataset_path, config.network.dim_mults) == (Path("pictures").absolute(), (1, 2))
    assert config.network.use_cfg


def test_a_run_can_be_started_again_from_its_own_config(tmp_path: Path) -> None:
    words = "--lr_decay cosine --no_horizontal_flip --time_distribution mean=-1 --coupling ot --import json"
    config = parse_rectified(words)
    file = write(tmp_path / "config.json", {"data": {}, "flow": {}, "training": recorded(config)})
    with pytest.raises(UsageError, match="belongs to a run with --import json: pass it again"):
        parse_rectified(f"--config {file}")
    again = parse_rectified(f"--config {file} --import json")
    assert recorded(again) == recorded(config)


@pytest.mark.parametrize(
    ("recorded_flags", "words", "then"),
    [
        ({"num_epochs": 2.0}, "--train_num_steps 5", {"num_epochs": None, "train_num_steps": 5}),
        ({"dataset_path": "pictures"}, "--dataset synthetic-flowers", {"dataset_path": None}),
    ],
)
def test_a_flag_overrides_those_that_would_outlive_it(
    tmp_path: Path, recorded_flags: dict[str, Any], words: str, then: dict[str, Any]
) -> None:
    file = write(tmp_path / "config.json", recorded_flags)
    now = recorded(parse_rectified(f"--config {file} {words}"))
    assert {name: now[name] for name in then} == then


@pytest.mark.parametrize(
    ("words", "name", "part"),
    [
        ("--network blocks_per_level=1", "network", ["Unet", "blocks_per_level=1"]),
        ("--autoencoder folder/a=b unit=1", "autoencoder", ["folder/a=b", "unit=1"]),
        ("--flow distance=mse", "flow", ["distance=mse"]),
    ],
)
def test_arguments_follow_the_name_of_a_part_or_are_those_of_the_default(words: str, name: str, part: Any) -> None:
    assert recorded(parse_rectified(words))[name] == part


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"seed": 1, "sede": 2}', "sets flags that this program does not have: sede"),
        ("seed: 1", "config.json is damaged: Invalid JSON: "),
        (None, "config.json is missing"),
        ('{"dim_mults": [1, 2, "--import", "os"]}', 'dim_mults.2 is "--import", but input should be a valid integer'),
        *((f'{{"training": {block}}}', "training must be an object with flags") for block in ("[]", "null", '"x"')),
        *((f'{{"import": {names}}}', "is damaged: import") for names in ("5", "[1]", "[null]", '"json"')),
        ('{"exclude": ["\\u0000.txt"]}', "its name contains a null character"),
        ('{"aspect_ratio": "3"}', "config.json is damaged: `aspect_ratio` is 3; it must be width:height"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError) as refusal:
        parse_rectified(f"--config {file}")
    assert sentence in str(refusal.value).replace("[Errno 2] ", "")
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("words", ["--budget 1m", "--one_step"])
def test_a_flag_that_excludes_one_of_the_file_names_the_file(tmp_path: Path, words: str) -> None:
    (tmp_path / "config.json").write_text('{"train_num_steps": 7}')
    with pytest.raises(UsageError, match=r"^--\w+ and --train_num_steps of --config exclude each other"):
        parse_rectified(f"--config {tmp_path}/config.json {words}")
    with pytest.raises(UsageError, match=r"^--\w+ and --\w+ exclude each other: pass one$"):
        parse_rectified(f"--config {tmp_path}/config.json {words} --train_num_steps 7")


def test_a_file_with_the_mark_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"seed": 7}')
    assert parse_rectified(f"--config {tmp_path}/config.json").run.seed == 7


def test_a_module_that_exits_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"--import exits_at_once failed \(SystemExit: 0\)"):
        import_modules(["exits_at_once"])


def start_command(words: list[str]) -> tuple[int, str, str]:
    """The exit code of ``python -m rectified_flow``, and what it wrote to stdout and stderr without slow packages."""
    source = f"""
import runpy, sys
sys.argv = {["rectified-flow", *words]!r}
sys.path.insert(0, {str(ROOT)!r})
try:
    runpy.run_module("rectified_flow", run_name="__main__")
finally:
    slow = {{"torch", "accelerate", "datasets", "matplotlib", "pydantic"}} & sys.modules.keys()
    assert not slow, slow
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_command_lists_its_programs_and_names_its_version() -> None:
    code, shown, errors = start_command(["--help"])
    assert (code, errors) == (0, "")
    listed = dict(line.strip().split(maxsplit=1) for line in shown.splitlines() if re.match(r"  [a-z-]+  ", line))
    assert listed.keys() == PROGRAMS.keys()
    assert all(summary.endswith(".") for summary in listed.values())
    assert len(shown.splitlines()) < 25
    assert max(map(len, shown.splitlines())) <= 104
    assert start_command([]) == (2, "", shown), "without a program, a script has made a mistake"
    code, shown, _ = start_command(["--version"])
    assert code == 0
    assert re.fullmatch(r"rectified-flow-trainer (\d+\.\d+\.\d+|is not installed)\n", shown)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("trian", "did you mean train?"),
        ("eval", "did you mean evaluate?"),
        ("--dataset_path", "choose one of train, one-step, sample, evaluate, export, watch, studio"),
    ],
)
def test_an_unknown_program_is_one_sentence(word: str, remedy: str) -> None:
    assert start_command([word]) == (2, "", f"rectified-flow: error: {word} is not a command; {remedy}\n")


def test_a_program_of_the_command_has_the_help_of_its_script() -> None:
    code, shown, errors = start_command(["sample", "--help"])
    assert (code, errors) == (0, "")
    words = [sys.executable, "sample.py", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert shown.startswith("usage: rectified-flow sample [-h]")
    assert shown == done.stdout.replace("sample.py", "rectified-flow sample", 1)
    code, _, errors = start_command(["sample", "--sede", "1"])
    assert code == 2
    assert errors.count("Unrecognized options: ") == 1
    code, _, errors = start_command(["train", "--weight_decay", "0.1", "--resolution", "64"])
    assert code == 2
    assert "--weight_decay: pass --optimizer weight_decay=0.01\n--resolution: pass --image_size\n" in errors


def test_messages_name_the_program_as_it_was_started() -> None:
    words = [sys.executable, "-m", "rectified_flow", "sample", "--import", "nobodys_module"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rectified-flow sample: error: --import nobodys_module failed")


@pytest.mark.parametrize("config_class", CONFIGS)
def test_no_flag_has_two_defaults(
    config_class: type[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse(config_class, "", ["--help"])
    helps: list[str] = []  # one for each flag: from the line that starts with it
    for line in capsys.readouterr().out.splitlines():
        if re.match(r"[│ ] --\w", line):
            helps.append("")
        if helps:
            helps[-1] += line.strip("│ ") + " "
    names = [each.split()[0].rstrip(",") for each in helps]
    assert names == [f"--{name}" for name in flag_types(config_class)]
    for each in helps:
        assert each.count("(default:") == 1, each
        assert "(default: )" not in each


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--network Vit", "`network` Vit is not registered: choose "),
        ("--network heads=3", "`network` heads=3: Unet takes KEY=VALUE with the keys dim, "),
        ("--network blocks_per_level=x", "`network` blocks_per_level is x; it must be a valid integer"),
        ("--flow condition_dropout=2", "`flow` condition_dropout is 2; it must be less than or equal to 1"),
        ("--space Sphere", "`space` Sphere is not registered: choose "),
        ("--time_distribution stdev=1", "`time_distribution` stdev=1: LogitNormal takes KEY=VALUE with the keys mean,"),
        ("--method reflow --teacher a --time_distribution mean=0", "`time_distribution` mean=0: UShaped takes "),
        ("--method distill --teacher a --time_distribution uniform", "--time_distribution "),
        ("--method mean_flow --prediction clean", "`prediction` has no effect: MeanFlow does not ask for prediction"),
        ("--guidance_scale 2", "`guidance_scale` has no effect: RectifiedFlow does not ask for guidance_scale"),
    ],
)
def test_a_name_or_option_that_does_not_exist_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        built(f"--dim_mults 1 {words}")
    assert str(refused.value).startswith(sentence)


def test_have_the_types_of_the_annotations() -> None:
    words = "--network dim_mults=[1,2] blocks_per_level=1 --time_distribution"
    flow = built(f"{words} LogitNormal stratified=true --flow condition_dropout=0.5")
    network, times = flow.network, flow.time_distribution
    assert (network.dim, network.dim_mults, network.blocks_per_level) == (8, (1, 2), 1)
    assert (times.mean, times.stratified, flow.condition_dropout) == (-0.5, True, 0.5)
