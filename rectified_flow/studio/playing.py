"""The tab Play: sample with conditions, vary a picture, generate a part of it, or draw it again from its file."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex

import gradio as gr
from PIL import Image, ImageChops

from rectified_flow.errors import UsageError
from rectified_flow.studio import commands, jobs, views
from rectified_flow.studio.events import Updates, act
from rectified_flow.studio.runs import Control, RunFolder
from rectified_flow.studio.watching import folder_of

DRAWN = "drawn"
"""Folder of drawn pictures, in that of a run."""
SOURCES = "sources"
"""Subfolder of a run for the pictures to translate and the painted pictures."""
ANY = "any"
WHITE = "#ffffff"
Flags = dict[str, object]
Painted = Mapping[str, Image.Image | list[Image.Image] | None]
"""A painted picture: the picture ``background``, and ``layers`` of the same size."""


class PlayTab:
    """The tab. Its controls depend on the conditions of the run; the newest pictures are those on the disk."""

    def __init__(self, runs: Path, run: gr.Dropdown) -> None:
        self.runs, self.run = runs, run
        with gr.Tab("Play", id="play", render_children=True):
            self.card = gr.HTML()

            self.ready = gr.Textbox(visible="hidden")

            gr.render(inputs=run, triggers=[self.ready.change])(self._controls)
            self.gallery = gr.Gallery(
                label="Pictures",
                columns=4,
                object_fit="contain",
                height="auto",
                visible=False,
                interactive=False,
                elem_id="gallery",
                buttons=["download", "fullscreen"],
            )
            self.chosen = gr.State("")
            self.nearest = gr.Image(
                label="Each picture beside the training pictures nearest to it",
                interactive=False,
                visible=False,
                buttons=["download", "fullscreen"],
            )
            with gr.Row(visible=False) as self.vary:
                self.change = gr.Slider(0.1, 0.9, 0.4, step=0.05, label="How different")
                again = gr.Button("More like the chosen picture")
            with gr.Accordion("Draw a picture again from its file", open=False):
                file = gr.File(label="A picture that this run generated", file_types=[".png"], height=140)
        self.inputs, self.outputs = [run], [self.ready, self.card, self.gallery, self.nearest, self.vary]
        act(self.gallery.select, self.choose, run, self.chosen)
        act(again.click, self.draw_more, [run, self.chosen, self.change], None)
        act(file.upload, self.draw_again, [run, file], None)

    def _controls(self, name: str | None) -> None:
        """Make the controls of a run."""
        if not name or not (folder := RunFolder(self.runs / name)).has_checkpoint:
            return
        fields: list[gr.components.Component] = []
        with gr.Row():
            fields += [field_of(control) for control in folder.controls]
        on = {"interactive": True}  # Gradio takes a field that is made later for one that shows a result
        with gr.Row():
            count = gr.Slider(1, 64, 16, step=1, label="Pictures", **on)
            info = "The same seed, the same pictures"
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=2**32 - 1, info=info, **on)
        guidance, auto = gr.State(None), gr.State(1.0)
        with gr.Accordion("Quality and checks", open=False):
            info = "More steps take longer and are more exact."
            calls = gr.Slider(1, 64, folder.default_steps, step=1, label="Steps", info=info, **on)
            if fields and not folder.is_one_step:
                info = "Above 1, pictures follow their values more clearly and vary less."
                guidance = gr.Slider(0, 6, 1, step=0.25, label="Guidance", info=info, **on)
            if not folder.is_one_step:
                info = "Above 1, samples are guided away from an early checkpoint of the run."
                auto = gr.Slider(1, 3, 1, step=0.25, label="Autoguidance", info=info, **on)
            info = "They show whether a picture is a copy of a training picture."
            near = gr.Checkbox(label="Show the nearest training pictures", info=info, **on)
        kinds = {"file_count": "multiple", "file_types": ["image"], "visible": folder.takes_pictures}
        sources = gr.File(label="Pictures to translate", **kinds, **on)
        button = gr.Button("Draw", variant="primary", elem_id="draw")
        settings = [count, seed, calls, guidance, auto]
        act(button.click, self.draw, [self.run, near, sources, *settings, *fields], None)
        with gr.Accordion("Change a part of a picture", open=folder.takes_pictures, visible=folder.can_fill):
            brush = gr.Brush(colors=[WHITE], default_color=WHITE, color_mode="fixed")
            kinds = {"sources": ["upload", "clipboard"], "type": "pil", "transforms": (), "layers": False}
            label = "Paint over the part that is to be generated"
            painted = gr.ImageEditor(label=label, brush=brush, elem_id="paint", **kinds, **on)
            fill = gr.Button("Generate the painted part", elem_id="fill")
        act(fill.click, self.fill, [self.run, painted, *settings, *fields], None)

    def draw(
        self, name: str, near: bool, sources: list[str] | None, count: float, seed: float, steps: float,
        guidance: float | None, auto: float, *values: object,
    ) -> None:  # fmt: skip
        """Sample pictures."""
        run = RunFolder(folder_of(self.runs, name))
        flags = _sampling(seed, steps, guidance, auto) | {"num_samples": int(count)}
        flags |= {"nearest": True} if near else {}
        if run.takes_pictures:
            if not sources:
                raise UsageError("This run translates pictures: give it some first.")
            flags |= {"from_images": _moved(sources, run.folder / SOURCES)}
        self._start(run, name, flags, _conditions(run, values))

    def fill(
        self, name: str, painted: Painted, count: float, seed: float, steps: float, guidance: float | None,
        auto: float, *values: object,
    ) -> None:  # fmt: skip
        """Generate the painted part of a picture, several times."""
        run = RunFolder(folder_of(self.runs, name))
        picture, mask = _picture_and_mask(painted)
        folder = _new_folder(run.folder / SOURCES)
        picture.save(folder / "picture.png")
        mask.save(folder / "mask.png")
        flags = _sampling(seed, steps, guidance, auto) | {"variants": int(count)}
        flags |= {"from_images": folder / "picture.png", "mask": folder / "mask.png"}
        self._start(run, name, flags, _conditions(run, values))

    def choose(self, name: str, event: gr.SelectData) -> str:
        """Return the picture that was chosen in the gallery."""
        job = jobs.newest(self.runs, "draw", name)
        found = views.pictures_in(_folder(job)) if job else []
        return str(found[event.index]) if isinstance(event.index, int) and event.index < len(found) else ""

    def draw_more(self, name: str, chosen: str, change: float) -> None:
        """Draw variations of a picture: noise is added to it, and taken away again."""
        run = RunFolder(folder_of(self.runs, name))
        if not chosen:
            raise UsageError("Choose a picture of the gallery first.")
        flags: Flags = {"num_samples": 8, "from_images": chosen, "strength": change, "seed": int(time.time()) % 10**6}
        self._start(run, name, flags)

    def draw_again(self, name: str, file: str) -> None:
        """Draw a picture again by the settings in its file."""
        run = RunFolder(folder_of(self.runs, name))
        self._start(run, name, {"like": file})

    def _start(self, run: RunFolder, name: str, flags: Flags, conditions: Mapping[str, str] | None = None) -> None:
        place = run.folder / DRAWN / time.strftime("%Y-%m-%d-%H%M%S")
        words = commands.draw(run, conditions or {}, {**flags, "output_dir": place})
        jobs.start(self.runs, jobs.Command("draw", name, words, {"folder": str(place)}))

    def wanted(self, name: str | None) -> Updates:
        """Return the newest pictures of a run."""
        run = RunFolder(self.runs / name) if name else None
        if run is None or not run.has_checkpoint:
            text = "Samples can be drawn as soon as the run has saved its first checkpoint."
            return {self.card: views.card("Not yet", text), self.gallery: gr.update(visible=False), self.ready: ""}
        job = jobs.newest(self.runs, "draw", name)
        if job is None:
            return {self.card: "", self.gallery: gr.update(visible=False), self.ready: name}
        is_done = job.code == 0
        found = [str(file) for file in self._shown(run, job)] if is_done else []
        near = _folder(job) / "nearest.png"
        shown: Updates = {self.card: views.job_card(job, "Drawing", ""), self.ready: name}
        if is_done:
            shown |= {self.gallery: gr.update(value=found, visible=bool(found))}
            shown |= {self.nearest: gr.update(value=near if near.exists() else None, visible=near.exists())}
            shown |= {self.vary: gr.update(visible=bool(found) and run.can_vary)}
        return shown

    @staticmethod
    def _shown(run: RunFolder, job: jobs.Job) -> list[Path]:
        """Return the pictures of the gallery: the samples, or a grid of measurements with their scale."""
        folder = _folder(job)
        return views.pictures_in(folder) if run.makes_pictures else sorted(folder.glob("grid*.png"))


def field_of(control: Control) -> gr.components.Component:
    """Return the field in which a person sets a condition."""
    label = control.name.replace("_", " ")
    if control.choices:
        return gr.Dropdown([ANY, *control.choices], value=ANY, label=label, interactive=True)
    if control.span is not None:
        low, high = control.span
        return gr.Slider(low, high, (low + high) / 2, label=label, interactive=True)
    return gr.Textbox("", label=label, placeholder=next(iter(control.examples), ""), interactive=True)


def _sampling(seed: float, steps: float, guidance: float | None, auto: float) -> Flags:
    """Return the flags of the settings of sampling; those without an effect are left out."""
    flags: Flags = {"seed": int(seed or 0), "steps": int(steps)}
    flags |= {"guidance_scale": guidance} if guidance not in (None, 1) else {}
    return flags | ({"autoguidance": auto} if auto != 1 else {})


def _conditions(run: RunFolder, values: Sequence[object]) -> dict[str, str]:
    """Return the values of the conditions as texts; an empty text means that a condition is not given."""
    pairs = zip(run.controls, values, strict=True)
    return {control.name: "" if value in (ANY, None) else str(value) for control, value in pairs}


def _folder(job: jobs.Job) -> Path:
    return Path(str(job.command.choices["folder"]))


def _moved(files: list[str], place: Path) -> Path:
    """Move uploaded files into a new folder of their own, and return it."""
    folder = _new_folder(place)
    for file in files:
        Path(file).replace(folder / Path(file).name)
    return folder


def _new_folder(place: Path) -> Path:
    folder = place / token_hex(4)
    folder.mkdir(parents=True)
    return folder


def _picture_and_mask(painted: Painted) -> tuple[Image.Image, Image.Image]:
    """Return the picture, and a mask that is white where the person painted."""
    picture, layers = painted["background"], painted["layers"]
    if not isinstance(picture, Image.Image):
        raise UsageError("Drop a picture here first, then paint over a part of it.")
    mask = Image.new("L", picture.size)
    for layer in layers if isinstance(layers, list) else ():
        mask = ImageChops.lighter(mask, layer.convert("RGBA").getchannel("A").resize(picture.size))
    if mask.getbbox() is None:
        raise UsageError("Paint over a part of the picture first.")
    return picture, mask
