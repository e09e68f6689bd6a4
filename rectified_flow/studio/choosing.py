"""The tabs Pictures and Time: choose the data, see what the program makes of them, and start."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from rectified_flow.errors import UsageError
from rectified_flow.registry import Document
from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Values, act, file_shown
from rectified_flow.studio.further import further_fields, value_of
from rectified_flow.studio.runs import Run, document, run_names
from rectified_flow.studio.uploads import receive, take_over, unused

CLASSES = "="
"""Value of the checkbox for the classes; no column on a command line can have this name."""
FEW = 20  # pictures below which samples are hardly more than copies; a guess, since 30 was the fewest measured
GOALS: Mapping[str, str | None] = {
    "Make pictures like these": None,
    "Colour grey pictures": "grey",
    "Enlarge small pictures four times": "downsample:4",
    "Fill painted holes": "mask:brush",
}
"""Tasks of a generator in words, each with the degradation that makes the sources from the pictures, if any."""
NO_PLAN = views.card("Choose the data first", "Drop pictures, or try drawn flowers.")


class ChooseTabs:
    """The tabs Pictures and Time. A draft is a job that plans a run; its choices fill the page after a reload."""

    def __init__(self, runs: Path, run: gr.Dropdown, tabs: gr.Tabs) -> None:
        self.runs, self.run, self.tabs = runs, run, tabs
        with gr.Tab("Pictures", id="pictures", render_children=True):
            self.draft = gr.State()
            with gr.Row(equal_height=True):
                label = "Drop pictures or a zip here"
                self.files = gr.File(label=label, file_count="multiple", height=190, min_width=280, elem_id="drop")
                with gr.Column(min_width=280):
                    folder = gr.Textbox(label="Or name a folder on this machine", placeholder="/home/me/cats")
                    use = gr.Button("Use this folder")
                    flowers = gr.Button("Try it with drawn flowers")
            self.seen = gr.HTML()
            with gr.Row():
                self.on = gr.Button("Next: the time", variant="primary", visible=False, elem_id="next")
                self.anew = gr.Button("Begin with other pictures", visible=False, elem_id="anew")
            label, info = "Conditions", "Classes and columns that you can choose when you generate pictures."
            columns = gr.CheckboxGroup([], label=label, info=info, visible=False, interactive=True)
            label = "Some of the pictures, as the network gets them"
            self.sheet = gr.Image(label=label, interactive=False, visible=False, buttons=["fullscreen"])
            with gr.Accordion("Something other than pictures like these", open=False):
                goal = gr.Radio([*GOALS], value=next(iter(GOALS)), label="What the generator learns")
                source = gr.Textbox(label="Folder of other pictures to translate into pictures like these")
        with gr.Tab("Time", id="time", render_children=True):
            self.name = gr.Textbox("first", label="Name of the run")
            label, info = "Minutes to train", "8 for a first look, 60 for good pictures"
            minutes = gr.Slider(3, 12 * 60, 8, step=1, label=label, info=info)
            label, info = "Then make a one-step generator, too", "It draws at once, and takes half of the time."
            one_step = gr.Checkbox(label=label, info=info)
            self.plan = gr.HTML(NO_PLAN)
            self.go = gr.Button("Start", variant="primary", interactive=False, elem_id="start")
            self.further = further_fields()
            self.same = gr.HTML()
        self.choices = {"folder": folder, "name": self.name, "minutes": minutes, "one_step": one_step}
        self.choices |= {"columns": columns, "goal": goal, "source": source, **self.further}
        self.inputs = {self.draft, self.name, minutes}
        self.outputs = [self.seen, self.on, self.anew, self.sheet, columns, self.plan, self.go, self.same]
        self.restored = [self.draft, *self.choices.values()]
        everything, looked = {*self.restored}, [self.draft, folder, self.name, one_step, columns]
        act([self.files.upload], self.take_files, {self.files, *everything}, [*looked, self.files])
        act([flowers.click], self.take_flowers, everything, [*looked, tabs])
        changes = [use.click, folder.submit, minutes.release, one_step.input, columns.input, goal.input]
        changes += [field.blur for field in (source, *self.further.values())]
        act(changes, self.look, everything, looked)
        act([self.on.click], lambda _: {tabs: gr.Tabs(selected="time")}, {self.draft}, [tabs], queue=False)
        act([self.anew.click], lambda _: {self.draft: None, folder: ""}, {self.draft}, [self.draft, folder])
        act([self.go.click], self.start, everything, [run, tabs])

    def take_files(self, values: Values) -> Values:
        """Copy dropped files into a folder of their own, and look at it.

        Files that were dropped before are added, unless a run was started on them.
        """
        paths, before = [Path(file) for file in values[self.files]], values[self.draft]
        folder = receive(self.runs, _name_from(paths[0].stem if len(paths) == 1 else ""), paths)
        old, kept = None if before is None else Path(before.choices["folder"]), Document()
        dropped = {each for each in folder.parent.iterdir() if not each.is_symlink()}
        used = [word for job in jobs.jobs(self.runs, "train") for word in job.words]
        used += [str(Run(self.runs, name).flags.get("dataset_path")) for name in run_names(self.runs)]
        if old in dropped and str(old) not in used:
            take_over(folder, old)
            kept = {"name": values[self.name]}
        for path in paths:
            path.unlink(missing_ok=True)  # it would use as much of the disk as the pictures
        return {**self.look(values, folder=str(folder), **kept), self.files: None}

    def take_flowers(self, values: Values) -> Values:
        """Look at drawn flowers, with a one-step generator, and go to the tab of the time."""
        looked = self.look(values, folder=commands.DRAWN_FLOWERS, one_step=True)
        return {**looked, self.tabs: gr.Tabs(selected="time")}

    def look(self, values: Values, **changes: object) -> Values:
        """Replace the draft by a dry run with the choices on the page, unless the draft has the same choices."""
        choices, before = self._choices(values) | changes, values[self.draft]
        is_same = before is not None and before.choices == choices and (before.is_busy or before.code == 0)
        if is_same or not choices["folder"]:
            return {self.draft: before}
        if before is None or before.choices["folder"] != choices["folder"]:  # other data have other columns
            name = unused(self.runs / _name_from(Path(choices["folder"]).name)).name
            choices |= {"name": name, "columns": [], **changes}
        words = commands.look(self._words(choices))
        if before is not None:
            before.stop()
        job = jobs.start(self.runs, "look", choices["name"], words, choices)
        changed = {field: choices[name] for name, field in self.choices.items() if choices[name] != values[field]}
        return {self.draft: job, **changed}

    def _choices(self, values: Values) -> Document:
        return {name: values[field] for name, field in self.choices.items()}

    def _words(self, choices: Document) -> list[str]:
        """Return the words of the training that was chosen."""
        flags: Document = {"degrade": GOALS[choices["goal"]], "one_step": choices["one_step"] or None}
        flags["source_path"] = commands.folder_path(choices["source"]) if choices["source"] else None
        flags["condition_on"] = [each for each in choices["columns"] if each != CLASSES]
        flags["use_cfg"] = CLASSES in choices["columns"] or None
        texts = {name: choices[name] for name in self.further if choices[name]}
        flags |= {name: value_of(self.further[name], text) for name, text in texts.items()}
        run = self.runs / commands.run_name(choices["name"])
        return commands.train(run, commands.data_flags(choices["folder"]), choices["minutes"], flags)

    def start(self, values: Values) -> Values:
        """Start the training, once, and go to the tab that shows it."""
        choices = self._choices(values)
        name, words = commands.run_name(choices["name"]), self._words(choices)
        if (self.runs / name).exists() or name in [job.run for job in jobs.queue(self.runs)]:
            raise UsageError(f"There is a run called {name}: choose another name, or resume that run on the tab Watch.")
        if values[self.draft] is not None:
            values[self.draft].stop()  # the run makes a plan of its own
        jobs.start(self.runs, "train", name, words)
        chosen = gr.update(value=name, choices=run_names(self.runs), visible=True)
        return {self.run: chosen, self.tabs: gr.Tabs(selected="watch")}

    def restore(self, values: Values) -> Values:
        """Return the newest draft and its choices, for a page that is opened anew; it shows a run that trains."""
        job = jobs.newest(self.runs, "look")
        tab = {self.tabs: gr.Tabs(selected="watch")} if jobs.queue(self.runs) else {}
        if job is None:
            return {**values, **tab}
        shown = {field: job.choices[name] for name, field in self.choices.items() if name in job.choices}
        ticks = gr.update(choices=job.choices["columns"], value=job.choices["columns"])
        return {**shown, self.choices["columns"]: ticks, self.draft: job, **tab}

    def wanted(self, values: Values) -> Values:
        """Return what both tabs show of a draft."""
        job: jobs.Job | None = values[self.draft]
        looked, plan = self._looked(job)
        shown: Values = {
            self.seen: "",
            self.on: gr.update(visible=bool(plan)),
            self.anew: gr.update(visible=job is not None),
            self.sheet: file_shown(None),
            self.choices["columns"]: gr.update(visible=False),
            self.plan: NO_PLAN,
            self.go: gr.update(interactive=bool(plan)),
            self.same: "",
        }
        if job is None:
            return shown
        words = commands.looked_at(job.words, values[self.name])
        shown[self.same] = views.terminal("The same in a terminal:", ["rectified-flow", *words])
        if looked is not None:
            return {**shown, **self._found(job, looked, plan, values)}
        card = views.job_card(job, "Looking at the pictures")
        if job.is_stopping:
            card = views.card("The choices were changed in another window", "Reload this page to see them.")
        return {**shown, self.seen: card, self.plan: card}

    def _looked(self, job: jobs.Job | None) -> tuple[jobs.Job | None, Document]:
        """Return a finished look at the data of a draft, and its plan: an earlier look if the draft is not finished."""
        if job is None:
            return None, {}
        others = reversed(jobs.jobs(self.runs, "look")) if job.is_busy or job.is_stopping else ()
        for each in (job, *others):
            is_same = all(each.choices[name] == job.choices[name] for name in ("folder", "source", "goal"))
            if is_same and each.code == 0 and (plan := document(views.file_of(each, views.PLAN))):
                return each, plan
        return None, {}

    def _found(self, job: jobs.Job, looked: jobs.Job, plan: Document, values: Values) -> Values:
        """Return what a finished look shows of a draft: the sheet, the facts and the plan."""
        classes, chosen, is_queued = plan["classes"], job.choices, bool(jobs.queue(self.runs))
        ticks = [(column, column) for column in plan["columns"] if column not in ("label", "labels")]
        if classes:
            ticks.insert(0, (f"class: {', '.join(classes[:6])}{', ...' if len(classes) > 6 else ''}", CLASSES))
        minutes, is_timed = values[self.choices["minutes"]], not any(chosen[name] for name in commands.LENGTHS)
        ends = time.time() + 60 * minutes if is_timed and not is_queued else None
        is_current = looked is job and minutes == chosen["minutes"]
        title = views.plan_words(plan, ends, is_current=is_current)
        seen = f"{plan['pictures']:,} pictures to train on"
        again = "Planning anew" if job.is_busy else ""
        few = "Samples will hardly differ from so few pictures: add more, if you can." if plan["pictures"] < FEW else ""
        text = "Another run is training; this run starts after it." if is_queued else again
        sheet = views.file_of(looked, views.SHEET)
        return {
            self.seen: views.card(seen, few or again, "finished") + views.facts(plan["words"]),
            self.sheet: file_shown(sheet, alt_text=". ".join(plan["words"])),
            self.choices["columns"]: gr.update(choices=ticks, value=chosen["columns"], visible=bool(ticks)),
            self.plan: views.card(title, text, "finished") + views.facts(views.warnings(looked) if is_current else ()),
        }


def _name_from(text: str) -> str:
    """Return the name of a run for the name of a file or a folder."""
    return re.sub(r"[^\w-]+", "-", text).strip("-")[:40] or "my-pictures"
