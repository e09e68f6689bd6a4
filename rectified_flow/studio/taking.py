"""The tab Take away: a web page, ONNX, a folder for diffusers, each as a zip."""

from functools import partial
from pathlib import Path
from urllib.parse import quote

import gradio as gr

from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Values, act
from rectified_flow.studio.jobs import Form

FORMS: dict[Form, tuple[str, str]] = {
    "page": ("A web page", "Generates pictures in the visitor's browser; for a web host, or for the hub as a Space."),
    "onnx": ("A program for other software", "ONNX, for apps, games and JavaScript; model.json describes it."),
    "diffusers": ("A folder for diffusers and the hub", "For Python programs; includes a model card."),
}
"""Title and text of a form of a generator."""
PUBLISH = "To publish it on the Hugging Face Hub, run hf auth login once, replace YOUR_NAME, and run:"


def link(text: str, file: Path, attributes: str) -> str:
    """Return a link to a file in the folder of the runs, which Gradio serves at an address relative to the studio."""
    return f'<p><a href="gradio_api/file={quote(str(file))}" {attributes}>{text}</a></p>'


class TakeTab:
    """The tab."""

    def __init__(self, runs: Path, run: gr.Dropdown) -> None:
        self.runs, self.run, self.cards = runs, run, dict[Form, gr.HTML]()
        with gr.Tab("Take away", id="take", render_children=True):
            for form, (title, text) in FORMS.items():
                with gr.Column(elem_classes="part"):
                    gr.HTML(f"<h3>{title}</h3><p>{text}</p>")
                    make = gr.Button("Make it", elem_id=f"make-{form}")
                    self.cards[form] = gr.HTML()
                act([make.click], partial(self.make, form), {run})
        self.inputs, self.outputs = {run}, [*self.cards.values()]

    def make(self, form: Form, values: Values) -> None:
        """Export the generator in a form, unless that export is in progress."""
        name = values[self.run]
        newest = jobs.newest(self.runs, form, name)
        if newest is None or not newest.is_busy:
            jobs.start(self.runs, form, name, commands.take(self.runs / name, form))

    def wanted(self, values: Values) -> Values:
        """Return how far each form of a run is."""
        return {card: self._card(values[self.run] or "", form) for form, card in self.cards.items()}

    def _card(self, run: str, form: Form) -> str:
        """Return the state of an export as HTML, with links to its files and the commands that publish them."""
        job = jobs.newest(self.runs, form, run)
        if job is None:
            return ""
        folder = job.output_folder
        card = views.job_card(job, "Writing", f"Ready in {folder}")
        if job.code == 0:
            card += link("Download the zip", job.zip, f'download id="zip-{form}"')
            if form == "page":
                card += link("Open the page", folder / "index.html", 'target="_blank" rel="noopener"')
            if uploads := commands.publish(folder, form, run):
                card += views.terminal(PUBLISH, *uploads)
        return card
