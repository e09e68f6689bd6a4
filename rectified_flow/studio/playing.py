"""The tab Play: sample with conditions, vary a picture, generate a part of it, or draw it again from its file."""

import time
from pathlib import Path

import gradio as gr
from PIL import Image

from rectified_flow.errors import UsageError
from rectified_flow.registry import Document
from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Component, Values, act, file_shown
from rectified_flow.studio.runs import Run
from rectified_flow.studio.uploads import receive, unused

DRAWN = "drawn"
"""Name of the folder of generated pictures in the folder of a run."""
MOMENT = "%Y-%m-%d-%H%M%S"
"""Format of the time in the name of a new folder."""
GRID, NEAREST = "grid.png", "nearest.png"
ON = {"interactive": True}
"""Gradio makes fields added later read-only unless this argument is passed."""


class PlayTab:
    """The tab. Its controls depend on the conditions of the run; the newest pictures are those on the disk."""

    def __init__(self, runs: Path, run: gr.Dropdown) -> None:
        self.runs, self.run = runs, run
        with gr.Tab("Play", id="play", render_children=True):
            self.card, self.ready, self.chosen = gr.HTML(), gr.Textbox(visible="hidden"), gr.State("")
            gr.render(inputs=self.ready, triggers=[self.ready.change])(self._controls)
            hidden = {"visible": False, "interactive": False, "buttons": ["download", "fullscreen"]}
            grid = {"columns": 4, "object_fit": "contain", "height": "auto", "elem_id": "gallery"}
            self.gallery = gr.Gallery(label="Pictures", **grid, **hidden)
            label = "Each picture beside the training pictures nearest to it"
            self.nearest = gr.Image(label=label, alt_text="pictures and training pictures", **hidden)
            with gr.Row(visible=False) as self.vary:
                self.change = gr.Slider(0.1, 0.9, 0.4, step=0.05, label="How different")
                again = gr.Button("More like the chosen picture")
            with gr.Accordion("Draw a picture again from its file", open=False):
                label = "A picture that this run generated"
                self.file = gr.File(label=label, file_types=[".png"], height=140)
        self.inputs, self.outputs = {run}, [self.ready, self.card, self.gallery, self.nearest, self.vary]
        act([self.gallery.select], self.choose, {run}, [self.chosen])
        act([again.click], self.draw_more, {run, self.chosen, self.change})
        act([self.file.upload], self.draw_again, {run, self.file})

    def _controls(self, name: str) -> None:
        """Make the controls of a run that has a checkpoint."""
        if not name:
            return
        run = Run(self.runs, name)
        with gr.Row():
            conditions = {condition: field_of(condition, kind) for condition, kind in run.controls.items()}
        settings = settings_of(run)
        files = {"file_count": "multiple", "file_types": ["image"], "visible": run.takes_pictures}
        sources = gr.File(label="Pictures to translate", **files, **ON)
        button = gr.Button("Draw", variant="primary", elem_id="draw")
        with gr.Accordion("Change a part of a picture", open=False, visible=run.can_fill) as part:
            kinds = {"sources": ["upload", "clipboard"], "type": "pil", "transforms": (), "visible": False}
            painted = gr.ImageMask(label="Paint over the part that is to be generated", elem_id="paint", **kinds, **ON)
            fill = gr.Button("Generate the painted part", elem_id="fill")

        def draw(values: Values, **flags: object) -> None:
            """Sample pictures."""
            if run.takes_pictures and not flags:
                if not values[sources]:
                    raise UsageError("This run translates pictures: add some first.")
                files = [Path(file) for file in values[sources]]
                folder = receive(self.runs / name, time.strftime(MOMENT), files)
                flags = {"from_images": folder, "num_samples": None}  # all of them
            chosen = {flag: values[field] or None for flag, field in settings.items()}
            self._start(name, chosen | flags, {condition: values[field] for condition, field in conditions.items()})

        def fill_part(values: Values) -> None:
            """Generate the painted part of a picture, several times."""
            pictures, flags = picture_and_mask(values[painted]), {"variants": values[settings["num_samples"]]}
            folder = receive(self.runs / name, time.strftime(MOMENT), [])
            for flag, picture in zip(("from_images", "mask"), pictures, strict=True):
                flags[flag] = folder / f"{flag}.png"
                picture.save(flags[flag])
            draw(values, num_samples=None, **flags)

        fields = {*settings.values(), *conditions.values()}
        act([button.click], draw, {sources, *fields})
        act([fill.click], fill_part, {sources, painted, *fields})
        # The canvas has the size of its place on the page when it is made, which is 0 in a closed accordion.
        act([part.expand], lambda _: {painted: gr.update(visible=True)}, set(), [painted], queue=False)

    def _folder_of_pictures(self, name: str) -> Path:
        """Return the folder of the newest pictures of a run, which need not exist."""
        made = [job.output_folder for job in jobs.jobs(self.runs, "draw", name) if job.code == 0]
        return made[-1] if made else self.runs / name / DRAWN

    def choose(self, values: Values, event: gr.SelectData) -> Values:
        """Return the picture that was chosen in the gallery."""
        return {self.chosen: pictures_in(self._folder_of_pictures(values[self.run]))[event.index]}

    def draw_more(self, values: Values) -> None:
        """Draw variations of a picture: noise is added to it, and taken away again."""
        if not values[self.chosen]:
            raise UsageError("Choose a picture of the gallery first.")
        flags = {"from_images": values[self.chosen], "strength": values[self.change], "num_samples": 8}
        self._start(values[self.run], {**flags, "seed": int(time.time()) % 10**6}, {})

    def draw_again(self, values: Values) -> None:
        """Draw a picture again by the settings in its file."""
        self._start(values[self.run], {"like": values[self.file]}, {})

    def _start(self, name: str, flags: Document, conditions: Document) -> None:
        folder = unused(self.runs / name / DRAWN / time.strftime(MOMENT))
        folder.mkdir(parents=True)
        words = commands.draw(Run(self.runs, name), conditions, {**flags, "output_dir": folder})
        jobs.start(self.runs, "draw", name, words)

    def wanted(self, values: Values) -> Values:
        """Return the newest pictures of a run."""
        run, card = Run(self.runs, values[self.run] or ""), ""
        folder, job = self._folder_of_pictures(run.name), jobs.newest(self.runs, "draw", run.name)
        found, is_ready = pictures_in(folder), bool(run.saved)
        if not is_ready:
            card = views.card("Not yet", "Samples can be drawn as soon as the run has saved its first checkpoint.")
        elif job is not None:
            card = views.job_card(job, "Drawing")
        return {
            self.ready: run.name if is_ready else "",
            self.card: card,
            self.gallery: gr.update(value=found, visible=bool(found)),
            self.nearest: file_shown(folder / NEAREST),
            self.vary: gr.update(visible=bool(found) and run.can_vary),
        }


def field_of(name: str, kind: Document) -> Component:
    """Return the input field of a condition, from its description. An empty field leaves the condition unset."""
    words = {"label": name.replace("_", " "), **ON}
    if "num_classes" in kind:
        names = kind.get("names") or range(kind["num_classes"])
        return gr.Dropdown([("any", ""), *map(str, names)], value="", **words)
    if quantiles := kind.get("quantiles"):
        low, high = quantiles[0], quantiles[-1]
        return gr.Slider(low, high, value=(low + high) / 2, **words)
    return gr.Textbox("", placeholder=next(iter(kind.get("examples") or ()), ""), **words)


def settings_of(run: Run) -> dict[str, Component]:
    """Make the settings of sampling, and return them by flag."""
    settings, guides = dict[str, Component](), not run.is_one_step
    with gr.Row():
        has_number = run.can_fill or not run.takes_pictures  # all pictures are translated, once
        settings["num_samples"] = gr.Slider(1, 64, 16, step=1, label="Pictures", visible=has_number, **ON)
        info = "The same seed, the same pictures"
        settings["seed"] = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, info=info, **ON)
    with gr.Accordion("Quality and checks", open=False):
        info = "More steps take longer and are more exact."
        settings["steps"] = gr.Slider(1, 64, 16 if guides else 1, step=1, label="Steps", info=info, **ON)
        if guides and run.controls:
            info = "Above 1, pictures follow their values more clearly and vary less."
            scale = 2 if any("encoder" in kind for kind in run.controls.values()) else 1
            settings["guidance_scale"] = gr.Slider(1, 6, scale, step=0.25, label="Guidance", info=info, **ON)
        if guides:
            info = "Above 1, samples are guided away from an early checkpoint of the run. Leave empty for the default."
            settings["autoguidance"] = gr.Number(None, minimum=1, maximum=3, label="Autoguidance", info=info, **ON)
        info = "Shows whether a picture is a copy of a training picture."
        settings["nearest"] = gr.Checkbox(label="Show the nearest training pictures", info=info, **ON)
    return settings


def pictures_in(folder: Path) -> list[str]:
    """Return the samples in a folder of drawn pictures, and the grid of measurements, which shows their scale."""
    files = sorted(folder.glob("[!.]*"))  # without the manifest and the lock
    hidden = {NEAREST} if any(file.suffix != ".png" for file in files) else {NEAREST, GRID}
    return [str(file) for file in files if file.suffix == ".png" and file.name not in hidden]


def picture_and_mask(painted: Document) -> tuple[Image.Image, Image.Image]:
    """Return a picture, and a mask that is white where a person painted over it.

    Args:
        painted: the picture ``background``, and ``layers`` of paint.
    """
    picture = painted["background"]
    if picture is None:
        raise UsageError("Drop a picture here first, then paint over a part of it.")
    mask = Image.new("L", picture.size)
    for layer in painted["layers"]:
        mask.paste(255, mask=layer.getchannel("A").resize(picture.size))
    if mask.getbbox() is None:
        raise UsageError("Paint over a part of the picture first.")
    return picture, mask
