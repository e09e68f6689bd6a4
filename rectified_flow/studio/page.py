"""The page: five tabs, one for each step, which show the state on the disk and are refreshed every 1.5 seconds."""

from collections.abc import Sequence
from pathlib import Path

import gradio as gr

from rectified_flow.studio.choosing import ChooseTabs
from rectified_flow.studio.events import Values, act
from rectified_flow.studio.playing import PlayTab
from rectified_flow.studio.runs import run_names
from rectified_flow.studio.taking import TakeTab
from rectified_flow.studio.watching import WatchTab

EVERY = 1.5  # time between two looks at the disk [s]
QUEUE_POLL = 0.05  # interval at which Gradio polls its event queue [s]
HEAD = '<div class="head"><h1>Studio</h1><p>Pictures in, a generator out. Everything stays on this machine.</p></div>'
CSS = Path(__file__).with_name("page.css")
THEME = gr.themes.Base(primary_hue="teal", secondary_hue="teal", neutral_hue="slate")


def build(runs: Path) -> gr.Blocks:
    """Return the page for a folder of runs, without serving it."""
    with gr.Blocks(title="Studio", analytics_enabled=False) as page:
        gr.HTML(HEAD)
        run = gr.Dropdown(run_names(runs), value=None, label="Run", interactive=True, visible=False, elem_id="run")
        with gr.Tabs(elem_id="steps") as tabs:
            choose = ChooseTabs(runs, run, tabs)
            others = WatchTab(runs, run, tabs), PlayTab(runs, run), TakeTab(runs, run)
        act([page.load], choose.restore, {choose.draft}, [*choose.restored, tabs])
        refresh(runs, run, [choose, *others])
    # By default 1 ms and 10 ms, which take 8% of a core while nothing happens. No event of the page has a progress bar.
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = QUEUE_POLL
    return page


def refresh(runs: Path, run: gr.Dropdown, parts: Sequence[ChooseTabs | WatchTab | PlayTab | TakeTab]) -> None:
    """Show what is new on the disk, at regular intervals, with the newest run if none is chosen."""
    inputs = {run, *(each for part in parts for each in part.inputs)}
    outputs = [run, *(each for part in parts for each in part.outputs)]
    pulse, shown = gr.Textbox(visible="hidden"), gr.State({})

    def wanted(values: Values) -> Values:
        names = run_names(runs)
        chosen = values[run] if values[run] in names else next(iter(names), None)
        new = {run: gr.update(choices=names, value=chosen, visible=bool(names))}
        for part in parts:
            new |= part.wanted({**values, run: chosen})
        return new

    def look(values: Values) -> Values:
        return {pulse: str(hash(repr([*wanted(values).values()])))}

    def show(values: Values) -> Values:
        new, before = wanted(values), values[shown]
        texts = {each: repr(value) for each, value in new.items()}
        changed = {each: value for each, value in new.items() if before.get(each) != texts[each]}
        return {**changed, shown: before | texts}

    # Gradio builds each output of a handler anew, so that the page is only refreshed if there is something new.
    act([gr.Timer(EVERY).tick], look, inputs, [pulse], queue=False)
    act([pulse.change], show, {shown, *inputs}, [shown, *outputs], queue=False)
