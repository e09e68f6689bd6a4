"""The tab Take away: a web page, ONNX, a folder for diffusers, each as a zip."""

from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import gradio as gr

from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Component, Values, act, file_shown
from rectified_flow.system.serving import serving

FORMS = {
    "page": ("A web page", "Generates pictures in the visitor's browser; for a web host, or for the hub as a Space."),
    "onnx": ("A program for other software", "ONNX, for apps, games and JavaScript; model.json describes it."),
    "diffusers": ("A folder for diffusers and the hub", "For Python programs; includes a model card."),
}
"""Title and text of a form of a generator."""
LINK = '<p><a href="{}" target="_blank" rel="noopener">Open the page</a></p>'
PUBLISH = "To publish it on the Hugging Face Hub, run hf auth login once, replace YOUR_NAME, and run:"
_SERVERS = ExitStack()


@cache
def address_of(folder: Path) -> str:
    """Serve a page to the browsers of this machine until the studio ends, and return its address."""
    return _SERVERS.enter_context(serving(folder))


class TakeTab:
    """The tab."""

    def __init__(self, runs: Path, run: gr.Dropdown, *, is_local: bool) -> None:
        self.runs, self.run, self.is_local = runs, run, is_local
        self.cards, self.files = dict[str, Component](), dict[str, Component]()
        with gr.Tab("Take away", id="take", render_children=True):
            for form, (title, text) in FORMS.items():
                with gr.Column(elem_classes="part"):
                    gr.HTML(f"<h3>{title}</h3><p>{text}</p>")
                    make = gr.Button("Make it", elem_id=f"make-{form}")
                    self.cards[form] = gr.HTML()
                    self.files[form] = gr.DownloadButton("Download the zip", visible=False, elem_id=f"zip-{form}")
                act([make.click], partial(self.make, form), {run})
        self.inputs, self.outputs = {run}, [*self.cards.values(), *self.files.values()]

    def make(self, form: str, values: Values) -> None:
        """Export the generator in a form, unless that export is in progress."""
        name, newest = values[self.run], self._newest(values, form)
        if newest is None or not newest.is_busy:
            jobs.start(self.runs, "take", name, commands.take(self.runs / name, form))

    def _newest(self, values: Values, form: str) -> jobs.Job | None:
        made = jobs.jobs(self.runs, "take", values[self.run] or "")
        return next((job for job in reversed(made) if job.command.folder.name == form), None)

    def wanted(self, values: Values) -> Values:
        """Return how far each form of a run is."""
        shown: Values = {}
        for form in FORMS:
            card, made, job = "", None, self._newest(values, form)
            if job is not None:
                folder, made = job.command.folder, job.zip if job.code == 0 else None
                card = views.job_card(job, "Writing", f"Ready in {folder.absolute()}")
                if made and form == "page" and self.is_local:
                    card += LINK.format(address_of(folder))
                if made and (uploads := commands.publish(folder, form, job.command.run)):
                    card += views.terminal(PUBLISH, *uploads)
            shown |= {self.cards[form]: card, self.files[form]: file_shown(made)}
        return shown
