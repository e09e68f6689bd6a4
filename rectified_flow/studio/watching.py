"""The tab Watch: how a run goes, its newest samples, its loss; stop it, go on, give it more time."""

from pathlib import Path

import gradio as gr

from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Values, act, file_shown
from rectified_flow.studio.runs import LOSS, NEIGHBOURS, SAMPLES, Run

RESUMED = ("interrupted", "failed", "finished")
"""States from which a run continues."""
NEAR = "Samples most similar to training pictures, each followed by its nearest training pictures"


class WatchTab:
    """The tab."""

    def __init__(self, runs: Path, run: gr.Dropdown, tabs: gr.Tabs) -> None:
        self.runs, self.run = runs, run
        with gr.Tab("Watch", id="watch", render_children=True):
            self.card = gr.HTML(views.card("No run yet", "Choose pictures and start, and the run is shown here."))
            with gr.Row():
                self.play = gr.Button("Play", visible=False, variant="primary", elem_id="to-play")
                self.stop = gr.Button("Stop and save", visible=False, elem_id="stop")
                self.resume = gr.Button("Resume", visible=False, variant="primary", elem_id="resume")
                self.more = gr.Number(10, label="Minutes", minimum=1, maximum=10_000, visible=False, min_width=120)
            hidden = {"visible": False, "interactive": False, "buttons": ["download", "fullscreen"]}
            self.image = gr.Image(alt_text="samples", elem_id="samples", **hidden)
            label, info = "Earlier samples", "0 shows the newest ones."
            self.earlier = gr.Slider(0, 1, 0, step=1, label=label, info=info, visible=False)
            self.neighbours = gr.Image(alt_text="samples and training pictures", **hidden)
            self.loss = gr.Image(alt_text="loss over the steps", **hidden)
        self.inputs = {run, self.earlier}
        self.outputs = [self.card, self.play, self.stop, self.resume, self.more, self.image, self.earlier]
        self.outputs += [self.neighbours, self.loss]
        act([self.play.click], lambda _: {tabs: gr.Tabs(selected="play")}, {run}, [tabs], queue=False)
        act([self.stop.click], self.stop_run, {run})
        act([self.resume.click], self.resume_run, {run, self.more})

    def stop_run(self, values: Values) -> None:
        """Stop a run, which saves a checkpoint first."""
        Run(self.runs, values[self.run]).stop()

    def resume_run(self, values: Values) -> None:
        """Continue a run: an interrupted one as it was started, and a finished one for some more minutes."""
        run = Run(self.runs, values[self.run])
        if run.state == "finished":
            jobs.start(self.runs, "train", run.name, commands.extend(run, values[self.more]))
        elif run.state in RESUMED and (run.flags or run.job):
            words = commands.resume(run) if run.job is None else run.job.words
            jobs.start(self.runs, "train", run.name, words)

    def wanted(self, values: Values) -> Values:
        """Return what the tab shows of a run."""
        if values[self.run] is None:
            return {}
        run = Run(self.runs, values[self.run])
        can_stop = run.state in ("waiting", "preparing", "running") and not run.is_elsewhere
        is_finished = run.state == "finished"
        resume, variant = ("Train longer", "secondary") if is_finished else ("Resume", "primary")
        can_resume = run.state in RESUMED and bool(run.flags or run.job)
        samples: list[tuple[int, Path | None]] = [*run.samples.items()] or [(0, None)]
        back = min(values[self.earlier] or 0, len(samples) - 1)
        step, picture = samples[-1 - back]
        return {
            self.card: views.run_card(run),
            self.play: gr.update(visible=is_finished),
            self.stop: gr.update(visible=can_stop),
            self.resume: gr.update(value=resume, variant=variant, visible=can_resume),
            self.more: gr.update(visible=is_finished),
            self.image: file_shown(picture, f"Samples at step {step:,}"),
            self.earlier: gr.update(maximum=max(1, len(samples) - 1), visible=len(samples) > 1),
            self.neighbours: file_shown(run.folder / SAMPLES / NEIGHBOURS, NEAR),
            self.loss: file_shown(run.folder / LOSS, "Loss"),
        }
