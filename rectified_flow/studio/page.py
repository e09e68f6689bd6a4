"""The page: five tabs, one for each step of the way, and the state on the disk shown in them once a second."""

from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from rectified_flow.studio.choosing import ChooseTabs
from rectified_flow.studio.events import Shown, Updates, act
from rectified_flow.studio.playing import PlayTab
from rectified_flow.studio.taking import TakeTab
from rectified_flow.studio.watching import WatchTab, names_of_runs

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
EVERY = 1.0  # time between two looks at the disk [s]
HEAD = '<div class="head"><h1>Studio</h1><p>Pictures in, a generator out. Everything stays on this machine.</p></div>'
CSS = """
.gradio-container { width: 100% !important; max-width: 960px !important; margin: 0 auto !important; }
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
#next, #start, #draw { max-width: 20rem; }
.bar { height: 8px; border-radius: 4px; margin-top: .6rem; background: var(--border-color-primary); overflow: hidden; }
.bar div { height: 100%; background: var(--color-accent); transition: width .6s; }
.facts { margin: .25rem 0 0; padding-left: 1.1rem; line-height: 1.55; overflow-wrap: anywhere; }
.same { margin: 0 0 .25rem; font-size: .85rem; color: var(--body-text-color-subdued); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; margin: 0; padding: .6rem .75rem;
  border-radius: 6px; background: var(--background-fill-secondary); color: var(--body-text-color); }
"""


def theme() -> gr.themes.Base:
    """Return the theme of the page: fonts of the system, so that nothing is fetched, and few colours."""
    return gr.themes.Base(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        font=FONTS,
        font_mono=["ui-monospace", "monospace"],
    )


def build(runs: Path) -> gr.Blocks:
    """Return the page of a folder of runs, which is not served yet."""
    with gr.Blocks(title="Studio", analytics_enabled=False) as page:
        gr.HTML(HEAD)
        shown, timer = gr.State({}), gr.Timer(EVERY)
        run = gr.Dropdown([], label="Run", interactive=True, visible=False, elem_id="run")
        with gr.Tabs(elem_id="steps") as tabs:
            choose = ChooseTabs(runs, run, tabs)
            parts = [choose, WatchTab(runs, run), PlayTab(runs, run), TakeTab(runs, run)]
        inputs = [part.inputs for part in parts]
        outputs = [*(each for part in parts for each in part.outputs), run, shown]

        def refresh(before: Shown, *values: object) -> object:
            rest, wanted = [*values], Updates()
            for part, own in zip(parts, inputs, strict=True):
                wanted |= part.wanted(*rest[: len(own)])
                rest = rest[len(own) :]
            wanted[run] = choices_of_run(runs, rest[0])
            now = {each._id: repr(value) for each, value in wanted.items()}
            updates: Updates
            updates = {each: value for each, value in wanted.items() if before.get(each._id) != now[each._id]}
            return updates | {shown: now} if updates else gr.skip()

        watched = [shown, *(each for own in inputs for each in own), run]
        act(page.load, choose.restore, None, choose.restored)
        act(timer.tick, refresh, watched, outputs)
    return page


def choices_of_run(runs: Path, chosen: object) -> Mapping[str, object]:
    """Return the update of the menu of runs; the newest run is chosen at first."""
    names = names_of_runs(runs)
    value = chosen if chosen in names.values() else next(iter(names.values()), None)
    return gr.update(choices=[*names.items()], value=value, visible=bool(names))
