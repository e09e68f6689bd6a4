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
from rectified_flow.studio.playing import PlayTab, pictures_in  # noqa: E402


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
        menu = tabs.start(chosen(tabs, folder="drawn flowers", name=name))[tabs.run]
    assert menu["value"] == "dogs"
    assert sorted(menu["choices"]) == ["cats", "dogs"]


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
    page = shown(tabs, values[tabs.draft])
    assert not page[tabs.go]["interactive"]
    assert not page[tabs.on]["visible"]
    assert "another window" in page[tabs.plan]


def looked(tabs: ChooseTabs, draft: jobs.Job, **plan: object) -> jobs.Job:
    """End a look, with a plan."""
    flags = {"image_size": 128, "train_num_steps": 100, "global_batch_size": 32, "batch_size": None}
    document = {"pictures": 60, "classes": [], "columns": [], "words": ["60 pictures"], "flags": flags, **plan}
    write(draft.folder, "plan", document)
    (draft.folder / jobs.ENDED).write_text("0")
    return draft


@pytest.fixture
def draft(tabs: ChooseTabs, tmp_path: Path) -> jobs.Job:
    """A look at the pictures of a folder, which is not finished."""
    (tmp_path / "cats").mkdir()
    return tabs.look(chosen(tabs, folder=str(tmp_path / "cats")))[tabs.draft]


def shown(tabs: ChooseTabs, draft: jobs.Job | None, **choices: object) -> Values:
    """Return the values that the tabs show for a draft."""
    return tabs.wanted(chosen(tabs, **choices) | {tabs.draft: draft})


def test_a_run_can_start_while_another_time_is_planned(
    tabs: ChooseTabs, draft: jobs.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.Job, "is_busy", property(lambda job: not (job.folder / jobs.ENDED).exists()))
    assert not shown(tabs, draft)[tabs.go]["interactive"]
    values = chosen(tabs, **draft.choices) | {tabs.draft: looked(tabs, draft), tabs.choices["minutes"]: 60}
    assert "3,200 images" in shown(tabs, draft)[tabs.plan]
    assert "images" not in shown(tabs, draft, minutes=60)[tabs.plan], "of another time"
    later = tabs.look(values)[tabs.draft]
    assert later.folder != draft.folder
    assert tabs.look(values).keys() == {tabs.draft}, "a name that is being typed stays"
    page = shown(tabs, later, minutes=60)
    assert (page[tabs.go]["interactive"], page[tabs.on]["visible"]) == (True, True)
    assert "60 pictures to train on" in page[tabs.seen]
    assert "(in 60 minutes)" in page[tabs.plan]
    assert "Planning anew" in page[tabs.plan]
    tabs.start(values | {tabs.draft: later})
    assert later.is_stopping, "the processor is for the run"


def test_nothing_stays_of_the_pictures_before(tabs: ChooseTabs, draft: jobs.Job, tmp_path: Path) -> None:
    """Neither when the look at the next ones fails, nor when one begins anew."""
    looked(tabs, draft)
    (tmp_path / "dogs").mkdir()
    failed = tabs.look(chosen(tabs, folder=str(tmp_path / "dogs")) | {tabs.draft: draft})[tabs.draft]
    (failed.folder / jobs.OUTPUT).write_text("rectified-flow train: error: dogs holds no pictures")
    (failed.folder / jobs.ENDED).write_text("2")
    for job in (failed, None):
        page = shown(tabs, job)
        assert not any(page[field]["visible"] for field in (tabs.on, tabs.sheet, tabs.choices["columns"]))
        assert not page[tabs.go]["interactive"]
        assert page[tabs.anew]["visible"] == (job is not None)
    again = tabs.look(chosen(tabs, **failed.choices) | {tabs.draft: failed})[tabs.draft]
    assert again.folder != failed.folder, "the folder may have pictures now"


def test_few_pictures_are_remarked(tabs: ChooseTabs, draft: jobs.Job) -> None:
    assert "so few pictures" not in shown(tabs, looked(tabs, draft, pictures=20))[tabs.seen]
    words = ["skipped 1 broken image; the first is a.jpg"]
    page = shown(tabs, looked(tabs, draft, pictures=19, words=words))
    assert "so few pictures" in page[tabs.seen]
    assert f"<li>{words[0]}</li>" in page[tabs.seen]


def drop(tabs: ChooseTabs, values: Values, file: Path) -> jobs.Job:
    file.write_text(file.name)
    return tabs.take_files(values | {tabs.files: [str(file)]})[tabs.draft]


def test_dropped_pictures_are_added_until_a_run_starts_on_them(tabs: ChooseTabs, tmp_path: Path) -> None:
    values = chosen(tabs)
    first = drop(tabs, values, tmp_path / "a.png")
    values |= {tabs.draft: first, tabs.name: "mine"}
    second = drop(tabs, values, tmp_path / "b.png")
    folder = Path(second.choices["folder"])
    assert sorted(file.name for file in folder.iterdir()) == ["a.png", "b.png"]
    assert [*folder.parent.iterdir()] == [folder], "they are not kept twice"
    assert second.run == "mine"
    values |= {field: second.choices[name] for name, field in tabs.choices.items()} | {tabs.draft: second}
    tabs.start(values)
    third = drop(tabs, values, tmp_path / "c.png")
    assert [file.name for file in Path(third.choices["folder"]).iterdir()] == ["c.png"]
    assert len([*folder.iterdir()]) == 2
    fourth = drop(tabs, values | {tabs.draft: None}, tmp_path / "d.png")
    assert [file.name for file in Path(fourth.choices["folder"]).iterdir()] == ["d.png"]


def test_pictures_of_a_named_folder_stay_there(tabs: ChooseTabs, draft: jobs.Job, tmp_path: Path) -> None:
    (tmp_path / "cats/a.png").write_text("a")
    drop(tabs, chosen(tabs) | {tabs.draft: draft}, tmp_path / "b.png")
    assert (tmp_path / "cats/a.png").exists()
    link = tabs.runs / "pictures/link"
    link.symlink_to(tmp_path / "cats", target_is_directory=True)
    for folder in (link, tabs.runs / "pictures/.."):
        named = tabs.look(chosen(tabs, folder=str(folder)))[tabs.draft]
        drop(tabs, chosen(tabs) | {tabs.draft: named}, tmp_path / "c.png")
        assert (tmp_path / "cats/a.png").exists()
        assert (tabs.runs / "pictures").exists()


def test_broken_pictures_are_skipped_unless_a_person_wants_to_know(tabs: ChooseTabs, draft: jobs.Job) -> None:
    assert "--skip_broken_images" in draft.words
    assert "--skip_broken_images" in words_of(tabs)
    assert "--no_skip_broken_images" in words_of(tabs, skip_broken_images="no", name="other")


def test_a_page_that_is_opened_while_a_run_trains_shows_it(
    tabs: ChooseTabs, draft: jobs.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tabs.tabs not in tabs.restore({tabs.draft: None})
    tabs.start(chosen(tabs, **draft.choices) | {tabs.draft: draft})
    monkeypatch.setattr(jobs.Job, "is_busy", True)
    assert tabs.restore({tabs.draft: None})[tabs.tabs].selected == "watch"


def test_the_gallery_has_the_samples_without_their_grid(tmp_path: Path) -> None:
    for name in ("grid.png", "nearest.png", "00000.png"):
        (tmp_path / name).touch()
    assert pictures_in(tmp_path) == [str(tmp_path / "00000.png")]
    (tmp_path / "00000.npy").touch()
    assert pictures_in(tmp_path)[1:] == [str(tmp_path / "grid.png")], "it has the scale of measurements"
    assert pictures_in(tmp_path / "none") == []


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
