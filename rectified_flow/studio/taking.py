"""The tab Take away: a web page, ONNX, a folder for diffusers, each as a zip."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import gradio as gr

from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Updates, act
from rectified_flow.studio.runs import RunFolder
from rectified_flow.studio.watching import folder_of
from rectified_flow.system.serving import serving

FORMS = {
    "page": (
        "A web page",
        "Generates pictures in the visitor's browser. Upload it to a web host, or to the Hugging Face Hub as a Space.",
    ),
    "onnx": (
        "A program for other software",
        "ONNX, for apps, games and JavaScript; model.json describes how to call it.",
    ),
    "diffusers": (
        "A folder for diffusers and the hub",
        "For Python programs that use diffusers; includes a model card.",
    ),
}


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
        self.runs, self.is_local = runs, is_local
        self.cards: dict[str, gr.HTML] = {}
        self.files: dict[str, gr.DownloadButton] = {}
        with gr.Tab("Take away", id="take", render_children=True):
            for form, (title, text) in FORMS.items():
                with gr.Column(elem_classes="part"):
                    gr.HTML(f"<h3>{title}</h3><p>{text}</p>")
                    make = gr.Button("Make it", elem_id=f"make-{form}")
                    self.cards[form] = gr.HTML()
                    self.files[form] = gr.DownloadButton("Download the zip", visible=False, elem_id=f"zip-{form}")
                act(make.click, self._maker(form), run, None)
        self.inputs, self.outputs = [run], [*self.cards.values(), *self.files.values()]

    def _maker(self, form: str) -> Callable[[str], None]:
        def make(name: str) -> None:
            run = RunFolder(folder_of(self.runs, name))
            newest = self._newest(name, form)
            if newest is None or newest.state not in ("waiting", "running"):
                words, folder = commands.take(run, form), str(run.folder / commands.TAKEN[form])
                jobs.start(self.runs, jobs.Command("take", name, words, {"form": form}, packed=folder))

        return make

    def _newest(self, name: str, form: str) -> jobs.Job | None:
        made = [job for job in jobs.jobs(self.runs, "take") if job.command.run == name]
        return next((job for job in reversed(made) if job.command.choices.get("form") == form), None)

    def wanted(self, name: str | None) -> Updates:
        """Return how far each form of a run is."""
        shown: Updates = {}
        for form in FORMS:
            job = self._newest(name, form) if name else None
            is_done = job is not None and job.code == 0
            card = (
                "" if job is None else views.job_card(job, "Writing", f"Ready in {Path(job.command.packed).absolute()}")
            )
            if form == "page" and is_done and self.is_local:
                card += LINK.format(address_of(self.runs / str(name) / commands.TAKEN[form]))
            if is_done and (uploads := commands.publish(RunFolder(self.runs / str(name)), form)):
                card += views.terminal(PUBLISH, *uploads)
            shown[self.cards[form]] = card
            shown[self.files[form]] = gr.update(value=str(job.zip) if job and is_done else None, visible=is_done)
        return shown
