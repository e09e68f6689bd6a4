"""Tests of what the tabs of the page do, without a browser."""

from pathlib import Path

import pytest
from PIL import Image

from rectified_flow.errors import UsageError
from rectified_flow.studio import jobs, runs
from tests.studio.test_runs import write

gradio = pytest.importorskip("gradio")
from rectified_flow.studio.choosing import ChooseTabs  # noqa: E402
from rectified_flow.studio.events import Values  # noqa: E402
from rectified_flow.studio.playing import PlayTab  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_start_process", lambda job: (job.folder / jobs.PROCESS).touch())


@pytest.fixture
def tabs(tmp_path: Path) -> ChooseTabs:
    with gradio.Blocks():
        return ChooseTabs(tmp_path / "runs", gradio.Dropdown(), gradio.Tabs())


def chosen(tabs: ChooseTabs, **choices: object) -> Values:
    """The values of a page on which some choices were made."""
    values = {field: field.value for field in tabs.choices.values()} | {tabs.draft: None}
    return values | {tabs.choices[name]: value for name, value in choices.items()}


def words_of(tabs: ChooseTabs, **choices: object) -> str:
    """The words of the training that starts with some choices."""
    tabs.start(chosen(tabs, folder="drawn flowers", **choices))
    job = jobs.newest(tabs.runs, "train")
    assert job is not None
    return " ".join(job.words)


def test_a_further_setting_is_a_switch_or_a_choice_or_some_words(tabs: ChooseTabs) -> None:
    words = words_of(tabs, mixed_precision="no", compile="no", dim_mults="1 2")
    assert "--mixed_precision no " in words
    assert "--no_compile " in words
    assert "--dim_mults 1 2 " in words


@pytest.mark.parametrize("text", ["it's", '"'])
def test_an_open_quotation_is_a_sentence(tabs: ChooseTabs, text: str) -> None:
    sentence = f"dim mults {text} cannot be read .no closing quotation.: write the text between double quotation marks"
    with pytest.raises(UsageError, match=sentence):
        words_of(tabs, dim_mults=text)


def test_a_run_that_starts_is_chosen_among_all(tabs: ChooseTabs) -> None:
    for name in ("cats", "dogs"):
        shown = tabs.start(chosen(tabs, folder="drawn flowers", name=name))[tabs.run]
    assert shown["value"] == "dogs"
    assert sorted(shown["choices"]) == ["cats", "dogs"]


def test_dropped_files_use_the_disk_once(tabs: ChooseTabs, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("a")
    values = tabs.take_files(chosen(tabs) | {tabs.files: [str(tmp_path / "a.png")]})
    assert not (tmp_path / "a.png").exists()
    assert values[tabs.files] is None
    (tmp_path / "a.png").write_text("a")
    (tmp_path / "b.zip").write_text("PK")
    with pytest.raises(UsageError, match=r"b\.zip cannot be unpacked"):
        tabs.take_files(chosen(tabs) | {tabs.files: [str(tmp_path / "a.png"), str(tmp_path / "b.zip")]})
    assert (tmp_path / "a.png").exists(), "the page sends it again"


def test_a_run_starts_only_with_a_plan(tabs: ChooseTabs) -> None:
    """A look that another window stops has no plan, and its exit code is 0."""
    values = tabs.look(chosen(tabs, folder="drawn flowers"))
    [job] = jobs.jobs(tabs.runs, "look")
    job.stop()
    (job.folder / jobs.ENDED).write_text("0")
    shown = tabs.wanted({tabs.draft: values[tabs.draft], tabs.name: "cats"})
    assert not shown[tabs.go]["interactive"]
    assert not shown[tabs.on]["visible"]
    assert "another window" in shown[tabs.plan]


def test_all_pictures_are_translated_each_time(tmp_path: Path) -> None:
    flow = {"kind": "RectifiedFlow", "space": {"kind": "Pixels"}, "from_source": True, "network": {"conditions": {}}}
    write(tmp_path / "cats", runs.CONFIG, {"training": {}, "flow": flow})
    files = [tmp_path / f"{number}.png" for number in range(17)]
    for file in files:
        Image.new("RGB", (1, 1)).save(file)
    with gradio.Blocks() as page:
        PlayTab(tmp_path, gradio.Dropdown())._controls("cats")
    [draw] = [each for each in page.fns.values() if each.name == "draw"]
    values = {field: field.value for field in draw.inputs}
    [sources] = [field for field in draw.inputs if isinstance(field, gradio.File)]
    for _ in range(2):
        draw.fn(values | {sources: list(map(str, files))})
    for job in jobs.jobs(tmp_path, "draw"):
        words = job.words
        assert "--num_samples" not in words
        assert len([*Path(words[words.index("--from_images") + 1]).iterdir()]) == 17
    assert len(jobs.jobs(tmp_path, "draw")) == 2
