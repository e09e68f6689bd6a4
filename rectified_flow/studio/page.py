"""The page: five tabs, one for each step of the way, and the state on the disk shown in them once a second."""

from collections.abc import Mapping
from hashlib import md5
from pathlib import Path

import gradio as gr

from rectified_flow.studio.choosing import ChooseTabs
from rectified_flow.studio.events import Shown, Updates, act
from rectified_flow.studio.playing import PlayTab
from rectified_flow.studio.taking import TakeTab
from rectified_flow.studio.watching import WatchTab, names_of_runs

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
EVERY = 1.5  # time between two looks at the disk [s]
HEAD = '<div class="head"><h1>Studio</h1><p>Pictures in, a generator out. Everything stays on this machine.</p></div>'
CSS = """
.gradio-container { width: 100% !important; max-width: 960px !important; margin: 0 auto !important; }
.dark { --color-accent: var(--primary-400); }
.html-container { padding: 0 !important; }
#samples .image-frame, #samples img { width: 100%; max-height: 36rem; object-fit: contain; }
.head h1 { font-size: 1.5rem; font-weight: 650; margin: .75rem 0 0; }
.head p { margin: .1rem 0 .25rem; color: var(--body-text-color-subdued); }
.card { border: 1px solid var(--border-color-primary); border-left: 4px solid var(--color-accent);
  border-radius: 8px; padding: .75rem 1rem; background: var(--background-fill-primary); }
.card h3 { margin: 0; font-size: 1.05rem; font-weight: 600; overflow-wrap: anywhere; }
.card p { margin: .25rem 0 0; overflow-wrap: anywhere; }
.card.bad { border-left-color: #c0392b; }
.card.good { border-left-color: #2d8a4e; }
#next, #start, #draw, #stop, #resume, .part button, .part a { max-width: 20rem; }
.part { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 1rem 1.25rem; gap: .75rem; }
.part h3 { margin: 0; font-size: 1.05rem; font-weight: 600; }
.part p { margin: .2rem 0 0; }
.block:has(> .html-container .prose:not(:has(*))) { display: none; }
#gallery .grid-wrap { max-height: none !important; }
@media (max-width: 600px) {
  #steps button[role=tab] { padding: 0 .45rem; font-size: .8rem; }
  #gallery .grid-container { grid-template-columns: repeat(2, 1fr) !important; }
  #next, #start, #draw, #stop, #resume, .part button, .part a { max-width: none; }
}
.bar { height: 8px; border-radius: 4px; margin-top: .6rem; background: var(--border-color-primary); overflow: hidden; }
.bar div { height: 100%; background: var(--color-accent); transition: width .6s; }
.facts { margin: .25rem 0 0; padding-left: 1.1rem; line-height: 1.55; overflow-wrap: anywhere; }
.same { margin: 0 0 .25rem; font-size: .85rem; color: var(--body-text-color-subdued); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; margin: 0; padding: .6rem .75rem;
  border-radius: 6px; background: var(--background-fill-secondary); color: var(--body-text-color); }
"""


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
            parts = [choose, WatchTab(runs, run), PlayTab(runs, run), TakeTab(runs, run, is_local=is_local)]
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
        act(timer.tick, lambda *values: md5(repr([*wanted(values).values()]).encode()).hexdigest(), watched, pulse)
        act(pulse.change, refresh, [shown, *watched], outputs)
    return page


def choices_of_run(runs: Path, chosen: object) -> Mapping[str, object]:
    """Return the update of the menu of runs; the newest run is chosen at first."""
    names = names_of_runs(runs)
    value = chosen if chosen in names.values() else next(iter(names.values()), None)
    return gr.update(choices=[*names.items()], value=value, visible=bool(names))
