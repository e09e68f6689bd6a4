"""Tests of flags that are paths, in every config."""

import os
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rectified_flow.cli.model_flags import EvaluateConfig, SampleConfig
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import rules_of


def parts(config_class: type) -> dict[str, type]:
    """Return all dataclasses of flags of a config by name."""
    nested = [kind for kind in get_type_hints(config_class).values() if is_dataclass(kind)]
    return {config_class.__name__: config_class} | {kind.__name__: kind for kind in nested if isinstance(kind, type)}


PARTS = {
    name: part
    for each in (TrainConfig, OneStepConfig, SampleConfig, EvaluateConfig)
    for name, part in parts(each).items()
}
FLAGS = [
    (part, name)
    for part in PARTS.values()
    for name, kind in get_type_hints(part).items()
    if (kind is Path or Path in get_args(kind)) and name != "config"  # which is read before there is a config
]


def given(part: type, flag: str, path: str) -> Any:
    run, needed = Path("run"), {"teacher_dir": "teacher", "mask": "from_images"}
    others = {needed[flag]: run} if flag in needed else {}
    return part(**{flag: Path(path)}, **others)


def test_all_paths_are_known() -> None:
    assert {name for _, name in FLAGS} >= {
        *("dataset_path", "cache_dir", "output_dir", "checkpoint"),
        *("teacher_dir", "teacher", "init_from", "from_images", "save_pretrained"),
    }


@pytest.mark.parametrize(("part", "flag"), FLAGS)
def test_a_path_that_cannot_be_is_refused_by_the_name_of_its_flag(part: type, flag: str, tmp_path: Path) -> None:
    for path, reason in {
        "~no such user/run": "Could not determine home directory",
        f"{tmp_path}/{os.fsdecode(bytes([233]))}": "its name is not UTF-8",
    }.items():
        with pytest.raises(UsageError) as refusal:
            given(part, flag, path)
        sentence = str(refusal.value)
        assert sentence.startswith(f"`{flag}` ")
        assert sentence.endswith(f" cannot be used ({reason}): choose another path")
        assert len(sentence) < 250


@pytest.mark.parametrize(("part", "flag"), FLAGS)
def test_a_home_folder_is_found(part: type, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(getattr(given(part, flag, "~/run"), flag)) == f"{tmp_path}/run"
    recorded = Path("run").absolute() if rules_of(part)[flag].local else Path("run")
    assert getattr(given(part, flag, "run"), flag) == recorded
