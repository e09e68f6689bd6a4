"""Words and small pieces of HTML of the page, from the state on the disk. All names are escaped."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from shlex import join

from rectified_flow.cli.settings import command_line
from rectified_flow.registry import Document
from rectified_flow.studio.jobs import Job
from rectified_flow.studio.runs import Run
from rectified_flow.system.files import replace_file
from rectified_flow.system.terminal import duration

WARNINGS = 5  # number of warnings that are shown
PLAN, SHEET = "plan", "data sheet"
"""Labels of the lines with which a dry run names its files."""
WORDS: Mapping[str, tuple[str, str]] = {
    "waiting": ("Waiting", "This run starts automatically when the other run ends."),
    "preparing": ("Preparing", "Reading the pictures and measuring the speed of this machine."),
    "running": ("Training{where}{ready}", "Step {step:,} of {total:,}"),
    "stopping": ("Stopping and saving", "Step {step:,} of {total:,}"),
    "finished": ("Finished", "{step:,} steps. The generator is ready."),
    "interrupted": ("Stopped", "{saved}You can resume the run at any time."),
    "failed": ("Failed", "{problem}"),
}
"""Title and text of a run by its state."""


PROGRAM = re.compile(r"([\w-]+( [\w-]+)?: )?error: ")
"""The name of the program and the word that precede the message of an error."""
BUDGET, SIZE, *_ = command_line({"budget": True, "image_size": True})
ON_PAGE = {
    "run the same command to resume": "press Resume",
    f"pass a longer {BUDGET}": "train for longer",
    f"pass a smaller {SIZE}, or a longer {BUDGET}": "train for longer, or with a smaller image size",
}
"""Advice for a terminal, and the same advice for the page."""


def message(job: Job) -> str:
    """Return the sentence with which a command ended: an error without the name of the program, or the last line."""
    if job.code not in (1, 2):
        again = "Press Resume" if job.kind == "train" else "Try again"
        return f"The command was killed, possibly because memory ran out or the machine was switched off. {again}."
    last = job.output.strip().rpartition("\n")[2]
    found = PROGRAM.match(last)
    return on_page(last[found.end() :] if found else last)


def on_page(text: str) -> str:
    """Return a sentence of the program with the advice that a person on the page can follow."""
    for advice, own in ON_PAGE.items():
        text = text.replace(advice, own)
    return text


def warnings(job: Job | None) -> list[str]:
    """Return the newest different warnings of a command, and that of its plan."""
    found = re.findall("^warning:? +(.+)$", job.output if job is not None else "", re.MULTILINE)
    return [*map(on_page, dict.fromkeys(found))][-WARNINGS:]


def facts(texts: Sequence[str]) -> str:
    """Return a list of sentences."""
    return f'<ul class="facts">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def file_of(job: Job, label: str) -> Path:
    """Return a copy, in the folder of the job, of a file that a dry run printed. The copy may not exist."""
    found = re.search(rf"^{label} +(.+)$", job.output, re.MULTILINE)
    path = Path(found[1]) if found else job.folder / label
    copy = job.folder / path.name
    if not copy.exists():
        with suppress(OSError):
            replace_file(copy, path.read_bytes(), durable=False)
    return copy


def plan_words(plan: Document, ends: float | None, *, is_current: bool = True) -> str:
    """Return a plan in a sentence, such as "128 px, about 60,000 images, ready at 14:35 (in 20 minutes)".

    Args:
        plan: the plan of a dry run.
        ends: when the run ends if it starts now [s since 1970]; None if that is unknown.
        is_current: whether the plan is for the time that is chosen now. Otherwise, its images do not count.
    """
    flags = plan["flags"]
    images = (flags["train_num_steps"] or 0) * (flags["global_batch_size"] or flags["batch_size"] or 0) * is_current
    seen = f", about {float(f'{images:.2g}'):,.0f} images shown to the network" if images else ""
    return f"{flags['image_size']} px{seen}{ready(ends)}"


def ready(ends: float | None) -> str:
    """Return the end of a sentence that says when something is ready [s since 1970]; nothing if that is unknown."""
    if ends is None:
        return ""
    clock = time.strftime("%H:%M", time.localtime(ends))
    return f", ready at {clock} (in {duration(max(1.0, ends - time.time()))})"


def card(title: str, text: str = "", state: str = "", share: float | None = None) -> str:
    """Return a card with a title, a line of text and a bar; its colour depends on the state."""
    bar = "" if share is None else f'<progress value="{share:.2f}" aria-label="progress"></progress>'
    return f'<div class="card {state}" role="status"><h3>{escape(title)}</h3><p>{escape(text)}</p>{bar}</div>'


def terminal(title: str, *commands: Sequence[str]) -> str:
    """Return a title and, below it, terminal commands, each given as a list of words."""
    text = "\n".join(map(join, commands))
    return f'<p class="same">{escape(title)}</p><pre tabindex="0">{escape(text)}</pre>'


def run_card(run: Run) -> str:
    """Return the card of a run: its state, its position, when it ends, and what it warns of."""
    step, total, saved = run.status.get("step") or 0, run.status.get("total_steps") or 0, run.saved
    words = {
        "step": step,
        "total": total,
        "saved": f"Step {saved:,} of {total:,} is saved. " if saved else "",
        "ready": ready(run.ends),
        "where": f" on {run.status['host']}" if run.is_elsewhere else "",
        "problem": on_page(str(run.status.get("message"))) if run.job is None else message(run.job),
    }
    title, text = (part.format(**words) for part in WORDS[run.state])
    done = saved if run.state == "interrupted" else step
    share = done / total if total and run.state in ("running", "stopping", "interrupted") else None
    return card(title, text, run.state, share) + facts(warnings(run.job))


def job_card(job: Job, doing: str, done: str = "") -> str:
    """Return the card of a command other than a training. A successful command has a card only with ``done``."""
    if job.is_busy:
        return card(f"{doing} ({time.time() - float(job.folder.name):.0f} s)")
    if job.code != 0:
        return card("That did not work", message(job), "failed")
    return card(done, state="finished") if done else ""
