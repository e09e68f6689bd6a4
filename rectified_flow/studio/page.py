"""The page: five tabs, one for each step, which show the state on the disk and are refreshed every 1.5 seconds."""

from collections.abc import Mapping
from hashlib import md5
from pathlib import Path

import gradio as gr

from rectified_flow.studio.choosing import ChooseTabs
from rectified_flow.studio.events import Part, Shown, Updates, act
from rectified_flow.studio.playing import PlayTab
from rectified_flow.studio.taking import TakeTab
from rectified_flow.studio.watching import WatchTab, names_of_runs

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
EVERY = 1.5  # time between two looks at the disk [s]
HEAD = '<div class="head"><h1>Studio</h1><p>Pictures in, a generator out. Everything stays on this machine.</p></div>'
CSS = Path(__file__).with_name("page.css")


def theme() -> gr.themes.Base:
    """Return the theme of the page: fonts of the system, so that nothing is fetched, and colours that can be read."""
    hues = {"primary_hue": "teal", "secondary_hue": "teal", "neutral_hue": "slate"}
    return gr.themes.Base(**hues, font=FONTS, font_mono=["ui-monospace", "monospace"]).set(
        color_accent="*primary_700",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_text_color="white",
        body_text_color_subdued="*neutral_600",
        block_info_text_color="*neutral_600",
        block_label_text_color="*neutral_600",
        block_title_text_color="*neutral_700",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )


def build(runs: Path, *, is_local: bool = True) -> gr.Blocks:
    """Return the page of a folder of runs, which is not served yet.

    Args:
        runs: the folder.
        is_local: whether browsers of this machine open the page.
    """
    with gr.Blocks(title="Studio", analytics_enabled=False) as page:
        gr.HTML(HEAD)
        shown, timer = gr.State({}), gr.Timer(EVERY)
        run = gr.Dropdown([], label="Run", interactive=True, visible=False, elem_id="run")
        with gr.Tabs(elem_id="steps") as tabs:
            choose = ChooseTabs(runs, run, tabs)
            parts: list[Part] = [choose, WatchTab(runs, run), PlayTab(runs, run), TakeTab(runs, run, is_local=is_local)]
        inputs = [part.inputs for part in parts]
        outputs = [*(each for part in parts for each in part.outputs), run, shown]
        watched = [*(each for own in inputs for each in own), run]
        pulse = gr.Textbox(visible="hidden")

        def wanted(values: tuple[object, ...]) -> Updates:
            rest, found = [*values], Updates()
            for part, own in zip(parts, inputs, strict=True):
                found |= part.wanted(*rest[: len(own)])
                rest = rest[len(own) :]
            return found | {run: choices_of_run(runs, rest[0])}

        def refresh(before: Shown, *values: object) -> object:
            found = wanted(values)
            now = {each._id: repr(value) for each, value in found.items()}
            return {each: value for each, value in found.items() if before.get(each._id) != now[each._id]} | {
                shown: now
            }

        act(page.load, choose.restore, None, choose.restored)
        # Gradio builds each output of a handler anew, so that the page is only refreshed if there is something new.
        act(
            timer.tick,
            lambda *values: md5(repr([*wanted(values).values()]).encode()).hexdigest(),
            watched,
            pulse,
            queue=False,
        )
        act(pulse.change, refresh, [shown, *watched], outputs, queue=False)
    return page


def choices_of_run(runs: Path, chosen: object) -> Mapping[str, object]:
    """Return the update of the menu of runs; the newest run is chosen at first."""
    names = names_of_runs(runs)
    value = chosen if chosen in names.values() else next(iter(names.values()), None)
    return gr.update(choices=[*names.items()], value=value, visible=bool(names))
