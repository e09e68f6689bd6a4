"""The tab Watch: how a run goes, its newest samples, its loss; stop it, go on, give it more time."""

from pathlib import Path

import gradio as gr
import pandas

from rectified_flow.errors import UsageError
from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Updates, act
from rectified_flow.studio.runs import RunFolder, run_folders

COLUMNS = ("step", "loss", "of")
NEAR = "Samples most similar to training pictures, each followed by its nearest training pictures"
NEWEST = 0  # place of the slider that follows the newest samples


def names_of_runs(runs: Path) -> dict[str, str]:
    """Return the runs by their names on the page, newest first: those in line, and those that have a folder."""
    asked = [job.command.run for job in reversed(jobs.jobs(runs, "train"))]
    found = [str(folder.relative_to(runs)) for folder in run_folders(runs)]
    names = [*(name for name in dict.fromkeys(asked) if name not in found), *found]
    return {commands.label(runs, runs / name): name for name in names}


def folder_of(runs: Path, name: object) -> Path:
    """Return the folder of a run on the page; names of other folders are refused."""
    if name not in names_of_runs(runs).values():
        raise UsageError("This run is gone: choose another one.")
    return runs / str(name)


class WatchTab:
    """The tab."""

    def __init__(self, runs: Path, run: gr.Dropdown) -> None:
        self.runs = runs
        with gr.Tab("Watch", id="watch", render_children=True):
            self.card = gr.HTML(
                views.card("No run yet", "Choose pictures and start, and the run is shown here."), padding=False
            )
            with gr.Row():
                self.stop = gr.Button("Stop and save", visible=False, elem_id="stop")
                self.resume = gr.Button("Resume", visible=False, variant="primary", elem_id="resume")
                self.more = gr.Number(10, label="Minutes", minimum=1, maximum=10_000, visible=False, min_width=120)
                self.extend = gr.Button("Train longer", visible=False, elem_id="extend")
            self.image = gr.Image(
                label="Samples", interactive=False, visible=False, buttons=["download", "fullscreen"], elem_id="samples"
            )
            self.earlier = gr.Slider(
                0, 1, NEWEST, step=1, label="Earlier samples", info="0 shows the newest ones.", visible=False
            )
            self.neighbours = gr.Image(interactive=False, visible=False, buttons=["fullscreen"])
            self.curve = gr.LinePlot(
                x="step", y="loss", color="of", color_title="loss of", title="Loss", visible=False, height=260
            )
            with gr.Accordion("What the program prints", open=False):
                self.lines = gr.Code(label="Newest lines", interactive=False, lines=6, max_lines=20)
        self.inputs = [run, self.earlier]
        self.outputs = [self.card, self.stop, self.resume, self.more, self.extend, self.image, self.earlier]
        self.outputs += [self.neighbours, self.curve, self.lines]
        act(self.stop.click, self.stop_run, run, None)
        act(self.resume.click, self.resume_run, run, None)
        act(self.extend.click, self.extend_run, [run, self.more], None)

    def wanted(self, name: str | None, earlier: int) -> Updates:
        """Return what the tab shows of a run."""
        if name is None or name not in names_of_runs(self.runs).values():
            return {}
        folder = self.runs / name
        run, (state, job) = RunFolder(folder), views.state_of(self.runs, folder)
        is_busy, is_ours = state in ("waiting", "preparing", "running"), not run.is_elsewhere
        samples = [*run.samples.items()]
        back = min(int(earlier or 0), max(0, len(samples) - 1))
        step, picture = samples[-1 - back] if samples else (0, None)
        losses, near, newest = run.losses, run.neighbours, max(run.samples, default=0)
        return {
            self.card: views.run_card(self.runs, folder),
            self.stop: gr.update(visible=is_busy and is_ours),
            self.resume: gr.update(visible=state in ("interrupted", "failed") and bool(run.flags)),
            self.more: gr.update(visible=state == "finished"),
            self.extend: gr.update(visible=state == "finished"),
            self.image: gr.update(
                value=picture, visible=picture is not None, label=f"Samples at step {step:,}", alt_text="samples"
            ),
            self.earlier: gr.update(maximum=max(1, len(samples) - 1), visible=len(samples) > 1),
            self.neighbours: gr.update(value=near, visible=near is not None, label=f"{NEAR} (step {newest:,})"),
            self.curve: gr.update(value=Curves(losses, columns=[*COLUMNS]), visible=len(losses) > 1),
            self.lines: views.last_lines(job) or "This run was not started here.",
        }

    def stop_run(self, name: str) -> None:
        """Stop a run, which saves a checkpoint first."""
        folder = folder_of(self.runs, name)
        state, job = views.state_of(self.runs, folder)
        if job is not None and job.state in ("waiting", "running"):
            job.stop()
        elif state == "running":
            RunFolder(folder).stop()

    def resume_run(self, name: str) -> None:
        """Continue an interrupted run with the command that started it, if the studio did so."""
        folder = folder_of(self.runs, name)
        state, job = views.state_of(self.runs, folder)
        if state in ("interrupted", "failed"):
            jobs.start(
                self.runs, jobs.Command("train", name, job.command.words if job else commands.resume(RunFolder(folder)))
            )

    def extend_run(self, name: str, minutes: float) -> None:
        """Give a finished run more time."""
        folder = folder_of(self.runs, name)
        if views.state_of(self.runs, folder)[0] == "finished":
            jobs.start(self.runs, jobs.Command("train", name, commands.extend(RunFolder(folder), float(minutes))))


class Curves(pandas.DataFrame):
    """The rows of curves as a table for the plot, which the page compares without printing it."""

    def __repr__(self) -> str:
        """Return the number of rows, which grows with each measurement."""
        return f"{len(self)} rows"
