"""Words and small pieces of HTML of the page, from the state on the disk. All names are escaped."""

import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from shlex import join

from rectified_flow.errors import UsageError
from rectified_flow.studio.jobs import Job, newest, queue
from rectified_flow.studio.runs import Document, RunFolder
from rectified_flow.system.files import read_document, replace_file
from rectified_flow.system.terminal import duration

PLAN, SHEET = "plan", "data sheet"
"""Labels of the lines with which a dry run names its files."""
LAST_LINES = 40
STATES = {
    "waiting": "Waiting in line",
    "preparing": "Preparing",
    "running": "Training",
    "stopping": "Stopping and saving",
    "finished": "Finished",
    "interrupted": "Stopped",
    "failed": "Failed",
}


def printed(output: str, label: str) -> str | None:
    """Return the text of the newest line with a label, as programs print it."""
    found = [line[12:].strip() for line in output.splitlines() if line[:12].rstrip() == label]
    return found[-1] if found else None


def message(output: str) -> str:
    """Return the sentence with which a command ended: an error without the name of the program, or the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].partition("error: ")[2] or lines[-1] if lines else "The command ended without a message."


def warnings(output: str) -> list[str]:
    """Return the warnings that a command printed, each once."""
    found = [line.partition("warning: ")[2] for line in output.splitlines() if line.startswith("warning: ")]
    return [*dict.fromkeys(found)]


def clock(when: float) -> str:
    """Return a time of day, with the day if it is another one."""
    day, today = time.localtime(when), time.localtime()
    return time.strftime("%H:%M" if day[:3] == today[:3] else "%H:%M on %A", day)


def texts(document: Document, name: str) -> list[str]:
    """Return a list of texts in a document."""
    found = document.get(name)
    return [*map(str, found)] if isinstance(found, list) else []


def plan_of(job: Job) -> Document:
    """Return the plan that a dry run wrote; empty if there is none."""
    path = printed(job.output, PLAN)
    with suppress(UsageError):
        return read_document(Path(path), dict[str, object]) if path else {}
    return {}


def sheet_of(job: Job) -> Path | None:
    """Return the sheet of the data that a dry run wrote, copied beside its job: a later dry run writes it anew."""
    path, copy = printed(job.output, SHEET), job.folder / "data.png"
    if path and not copy.exists():
        with suppress(OSError):
            replace_file(copy, Path(path).read_bytes(), durable=False)
    return copy if copy.exists() else None


def plan_words(plan: Document, seconds: float | None) -> str:
    """Return a plan in a sentence, such as "128 px, about 60,000 images, ready at 14:35"."""
    flags = plan["flags"]
    assert isinstance(flags, dict)
    images = int(flags["train_num_steps"] or 0) * int(flags["global_batch_size"] or flags["batch_size"] or 0)
    seen = f"about {float(f'{images:.2g}'):,.0f} images shown to the network"
    ready = f", ready at {clock(time.time() + seconds)}" if seconds else ""
    return f"{flags['image_size']} px, {seen}{ready}"


def wait_of(runs: Path) -> float:
    """Return the seconds until the training that runs now, if one does, ends; jobs in line count with an hour each."""
    ahead = queue(runs)
    ends = [RunFolder(runs / job.command.run).ends for job in ahead[:1]]
    return sum(max(0.0, end - time.time()) for end in ends if end) + 3600.0 * max(0, len(ahead) - len(ends))


def state_of(runs: Path, folder: Path) -> tuple[str, Job | None]:
    """Return the state of a run, and the newest job that trains it, if the studio started one."""
    run = RunFolder(folder)
    job = newest(runs, "train", str(folder.relative_to(runs)))
    if job is not None and job.state in ("waiting", "running"):
        if job.is_stopping:
            return "stopping", job
        return ("waiting" if job.state == "waiting" else "running" if run.state == "running" else "preparing"), job
    if job is not None and job.code and not job.is_stopping and run.state == "interrupted":
        return "failed", job
    return run.state, job


def card(title: str, text: str = "", share: float | None = None, *, tone: str = "") -> str:
    """Return a card with a title, a line of text and a bar; ``tone`` is ``bad`` or ``good``."""
    bar = ""
    if share is not None:
        width = f"{100 * min(max(share, 0.0), 1.0):.0f}"
        bar = f'<div class="bar" role="progressbar" aria-label="progress" aria-valuenow="{width}" aria-valuemin="0" '
        bar += f'aria-valuemax="100"><div style="width:{width}%"></div></div>'
    below = f"<p>{escape(text)}</p>" if text else ""
    return f'<div class="card {tone}" role="status"><h3>{escape(title)}</h3>{below}{bar}</div>'


def listed(texts: Sequence[str]) -> str:
    """Return a list of sentences."""
    return f'<ul class="facts">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>' if texts else ""


def terminal(title: str, *commands: Sequence[str]) -> str:
    """Return a title and, below it, terminal commands, each given as a list of words."""
    text = "\n".join(map(join, commands))
    return f'<p class="same">{escape(title)}</p><pre tabindex="0">{escape(text)}</pre>'


def run_card(runs: Path, folder: Path) -> str:
    """Return the card of a run: its state, its position, when it ends, and what it warns of."""
    run, (state, job) = RunFolder(folder), state_of(runs, folder)
    title, text, tone = STATES.get(state, state), "", ""
    share = run.step / run.total if run.total else None
    if state == "running":
        left = run.ends
        when = f", ready at {clock(left)} (in {duration(max(1.0, left - time.time()))})" if left else ""
        where = f" on {run.status.get('host')}" if run.is_elsewhere else ""
        title, text = f"Training{where}{when}", f"Step {run.step:,} of {run.total:,}"
    elif state == "waiting":
        text, share = "This run starts by itself when the other run ends.", None
    elif state == "preparing" and job is not None:
        text, share = "Pictures are read, and the speed of this machine is measured.", None
    elif state == "failed":
        text = message(job.output) if job is not None else str(run.status.get("message"))
        tone = "bad"
    elif state == "interrupted":
        text = f"Step {run.step:,} of {run.total:,} is saved. You can resume the run at any time."
    elif state == "finished":
        text, share, tone = f"{run.step:,} steps. The generator is ready: play with it.", None, "good"
    found = listed(warnings(job.output) if job is not None else [])
    return card(title, text, share, tone=tone) + found


def job_card(job: Job, doing: str, done: str) -> str:
    """Return the card of a command that is not a training."""
    state = job.state
    if state in ("waiting", "running"):
        return card(f"{doing} ({max(0.0, time.time() - job.made):.0f} s)")
    if state == "lost" or job.code:
        text = message(job.output) if state == "ended" else "The command was ended from outside. Try again."
        return card("That did not work", text, tone="bad")
    return card(done, tone="good") if done else ""


def last_lines(job: Job | None) -> str:
    """Return the newest lines that a job printed."""
    return "" if job is None else "\n".join(job.output.replace("\r", "\n").splitlines()[-LAST_LINES:])


def pictures_in(folder: Path) -> list[Path]:
    """Return the samples in a folder of drawn pictures."""
    found = sorted(folder.glob("*.png"))
    return [file for file in found if not file.stem.startswith(("grid", "nearest"))]
