"""The tabs Pictures and Time: choose the data, see what the program makes of them, and start."""

import re
from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from rectified_flow.errors import UsageError
from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Updates, act
from rectified_flow.studio.further import Further
from rectified_flow.studio.runs import Document
from rectified_flow.studio.uploads import receive

CLASSES = "="
"""Value of the checkbox for the classes; no column on a command line can have this name."""
AS_THEY_ARE, TRANSLATE = "Make pictures like these", "Turn other pictures into pictures like these"
GOALS: Mapping[str, Mapping[str, object]] = {
    AS_THEY_ARE: {},
    TRANSLATE: {},
    "Colour grey pictures": {"degrade": "grey"},
    "Enlarge small pictures four times": {"degrade": "downsample:4"},
    "Fill painted holes": {"degrade": "mask:brush"},
}
FIRST_MINUTES = 8
Choices = Mapping[str, object]


class ChooseTabs:
    """The tabs Pictures and Time. A draft is a job that plans a run; its choices fill the page after a reload."""

    def __init__(self, runs: Path, run: gr.Dropdown, tabs: gr.Tabs) -> None:
        self.runs = runs
        with gr.Tab("Pictures", id="pictures", render_children=True):
            self.draft = gr.State("")
            with gr.Row(equal_height=True):
                with gr.Column(min_width=280):
                    label = "Drop pictures or a zip here"
                    files = gr.File(label=label, file_count="multiple", height=190, elem_id="drop")
                with gr.Column(min_width=280):
                    self.folder = gr.Textbox(label="Or name a folder on this machine", placeholder="/home/me/cats")
                    use = gr.Button("Use this folder")
                    flowers = gr.Button("Try it with drawn flowers")
            self.seen = gr.HTML()
            self.on = gr.Button("Next: the time", variant="primary", visible=False, elem_id="next")
            label, info = "Conditions", "Classes and columns that you can choose when you generate pictures."
            self.columns = gr.CheckboxGroup([], label=label, info=info, visible=False, interactive=True)
            label = "Some of the pictures, as the network gets them"
            self.sheet = gr.Image(label=label, interactive=False, visible=False, buttons=["fullscreen"])
            with gr.Accordion("Something other than pictures like these", open=False):
                self.goal = gr.Radio([*GOALS], value=AS_THEY_ARE, label="What the generator learns")
                self.source = gr.Textbox(label="Folder of the other pictures", visible=False)
        with gr.Tab("Time", id="time", render_children=True):
            self.name = gr.Textbox("first", label="Name of the run")
            least, most, info = (
                commands.LEAST_MINUTES,
                commands.MOST_MINUTES,
                "8 for a first look, 60 for good pictures",
            )
            self.minutes = gr.Slider(least, most, FIRST_MINUTES, step=1, label="Minutes to train", info=info)
            label, info = "Then make a one-step generator, too", "It draws at once, and takes half of the time."
            self.one_step = gr.Checkbox(label=label, info=info)
            self.plan = gr.HTML()
            self.go = gr.Button("Start", variant="primary", interactive=False, elem_id="start")
            self.further = Further()
            self.same = gr.HTML()
        self.choices = {
            **{"folder": self.folder, "name": self.name, "minutes": self.minutes, "one_step": self.one_step},
            **{"columns": self.columns, "goal": self.goal, "source": self.source, **self.further.fields},
        }
        everything = [self.draft, *self.choices.values()]
        self.inputs = [self.draft, self.name]
        self.outputs = [self.seen, self.on, self.sheet, self.columns, self.plan, self.go, self.same]
        self.restored = [*everything, *self.outputs]
        looked = [self.draft, self.name]
        act(files.upload, self.take_files, [files, *everything], [*looked, self.folder, files])
        act(use.click, self.take_folder, everything, looked)
        act(self.folder.submit, self.take_folder, everything, looked)
        act(flowers.click, self.take_flowers, everything, [*looked, self.folder, self.one_step, tabs])
        act(self.goal.input, lambda goal: gr.update(visible=goal == TRANSLATE), self.goal, self.source, queue=False)
        changes = [self.minutes.release, self.minutes.input, self.one_step.input, self.columns.input, self.goal.input]
        for event in [*changes, self.source.blur, *self.further.changes]:
            act(event, self.look_again, everything, self.draft)
        act(self.on.click, lambda: gr.Tabs(selected="time"), None, tabs, queue=False)
        act(self.go.click, self.start, everything, [run, tabs])

    # Looks at the data

    def take_files(self, files: list[str], draft: str, *values: object) -> tuple[object, ...]:
        """Copy dropped files into a folder of their own, and look at it."""
        paths = [Path(file) for file in files]
        folder = receive(self.runs.absolute(), _name_from(paths[0].stem if len(paths) == 1 else "pictures"), paths)
        return *self._look_at(str(folder), draft, values), str(folder), None

    def take_folder(self, draft: str, *values: object) -> tuple[str, str]:
        """Look at the folder that is named."""
        folder = str(values[0]).strip()
        if not folder:
            raise UsageError("Name a folder first, or drop pictures.")
        return self._look_at(folder, draft, values)

    def take_flowers(self, draft: str, *values: object) -> tuple[object, ...]:
        """Look at drawn flowers, with a one-step generator, and go to the tab of the time."""
        draft, name = self._look_at("", draft, values, one_step=True)
        return draft, name, "", True, gr.Tabs(selected="time")

    def look_again(self, draft: str, *values: object) -> object:
        """Look at the same data with other choices."""
        choices = self._named(values)
        before = _job(draft)
        if before is None or before.command.choices == choices:
            return gr.skip()
        return self._look(draft, choices)

    def _look_at(self, folder: str, draft: str, values: tuple[object, ...], **others: object) -> tuple[str, str]:
        """Look at other data. The columns of the former data are forgotten, and the run gets a name after the data."""
        commands.data_flags(folder)
        name = self._free_name(_name_from(Path(folder).name if folder else "flowers"))
        return self._look(draft, {**self._named(values), "folder": folder, "name": name, "columns": [], **others}), name

    def _look(self, draft: str, choices: Choices) -> str:
        """Start a look in place of the draft, and return its folder."""
        words = commands.look(self._words(choices))
        before = _job(draft)
        if before is not None and before.state in ("waiting", "running"):
            before.stop()
        return str(jobs.start(self.runs, jobs.Command("look", str(choices["name"]), words, dict(choices))).folder)

    def _named(self, values: tuple[object, ...]) -> dict[str, object]:
        return dict(zip(self.choices, values, strict=True))

    def _words(self, choices: Choices) -> list[str]:
        """Return the words of the training that was chosen."""
        flags, columns, minutes = dict(GOALS[str(choices["goal"])]), choices["columns"], choices["minutes"]
        assert isinstance(columns, list)
        assert isinstance(minutes, int | float)
        if choices["goal"] == TRANSLATE:
            flags["source_path"] = commands.folder_path(str(choices["source"]))
        flags["condition_on"] = [each for each in columns if each != CLASSES]
        flags |= {"use_cfg": True} if CLASSES in columns else {}
        flags |= {"one_step": True} if choices["one_step"] else {}
        flags |= self.further.flags(choices)
        run = self.runs / commands.run_name(str(choices["name"]))
        return commands.train(run, commands.data_flags(str(choices["folder"])), minutes, flags)

    def _free_name(self, name: str) -> str:
        taken = {path.name for path in self.runs.glob("*")} | {job.command.run for job in jobs.queue(self.runs)}
        names = (name if number == 1 else f"{name}-{number}" for number in range(1, len(taken) + 2))
        return next(each for each in names if each not in taken)

    # The state on the page

    def restore(self) -> list[object]:
        """Return the newest draft, its choices and what it shows, for a page that is opened anew."""
        job = jobs.newest(self.runs, "look")
        if job is None or job.command.choices.keys() != self.choices.keys():
            return [gr.skip()] * len(self.restored)
        choices, draft = job.command.choices, str(job.folder)
        shown: dict[object, object] = {**self.wanted(draft, str(choices["name"]))}
        ticks = shown.get(self.columns)
        columns = {**ticks, "value": choices["columns"]} if isinstance(ticks, dict) else gr.skip()
        values = [columns if name == "columns" else value for name, value in choices.items()]
        return [
            draft,
            *values,
            *(gr.skip() if each is self.columns else shown.get(each, gr.skip()) for each in self.outputs),
        ]

    def wanted(self, draft: str, name: str) -> Updates:
        """Return what both tabs show of a draft."""
        job = _job(draft)
        if job is None:
            hint = views.card("Choose the data first", "Drop pictures on the tab Pictures, or try drawn flowers.")
            return {self.seen: "", self.plan: hint, self.go: gr.update(interactive=False)}
        plan, card, is_good = views.plan_of(job), views.job_card(job, "Looking at the pictures", ""), job.code == 0
        shown: Updates = {self.seen: card, self.plan: card, self.go: gr.update(interactive=is_good)}
        same = views.terminal("The same in a terminal:", ["rectified-flow", *commands.without_look(job, name)])
        shown |= {self.on: gr.update(visible=is_good), self.same: same}
        return shown | self._plan(job, plan) if is_good and plan else shown

    def _plan(self, job: jobs.Job, plan: Document) -> Updates:
        """Return what a finished look shows: the sheet, the facts and the plan."""
        classes, columns, facts = (views.texts(plan, name) for name in ("classes", "columns", "words"))
        sheet, wait = views.sheet_of(job), views.wait_of(self.runs)
        ticks = [(f"class: {', '.join(classes[:6])}{', ...' * (len(classes) > 6)}", CLASSES)] * bool(classes)
        ticks += [(column, column) for column in columns if column not in ("label", "labels")]
        text = views.plan_words(plan, commands.seconds_of(job, wait))
        return {
            self.seen: views.card(f"{plan['pictures']:,} pictures to train on", tone="good"),
            self.sheet: gr.update(value=sheet, visible=sheet is not None, alt_text=". ".join(facts)),
            self.columns: gr.update(choices=ticks, visible=bool(ticks)),
            self.plan: views.card(text, "Another run trains; this one will wait in line." * bool(wait), tone="good"),
        }

    def start(self, draft: str, *values: object) -> tuple[object, ...]:
        """Start the training, once, and go to the tab that shows it."""
        choices = self._named(values)
        name, words = commands.run_name(str(choices["name"])), self._words(choices)
        if (self.runs / name).exists() or name in [job.command.run for job in jobs.queue(self.runs)]:
            raise UsageError(f"There is a run called {name}: choose another name, or resume that run on the tab Watch.")
        jobs.start(self.runs, jobs.Command("train", name, words))
        return gr.update(value=name, choices=[(name, name)], visible=True), gr.Tabs(selected="watch")


def _job(draft: str) -> jobs.Job | None:
    """Return the job of a draft; None without one."""
    return jobs.Job(Path(draft)) if draft and (Path(draft) / jobs.JOB).exists() else None


def _name_from(text: str) -> str:
    """Return the name of a run for the name of a file or a folder."""
    return re.sub(r"[^\w-]+", "-", text).strip("-")[:40] or "pictures"
