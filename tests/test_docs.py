"""README.md and docs/: each command runs or is marked as not run, each flag, import, link and anchor exists.

A bash block of a page is run, unless the line before it is ``<!-- not run: REASON -->``. A python block is compiled and
its imports are checked, and it is run if the line before it is ``<!-- run -->``. The blocks of a page run in order, in
one folder. Programs run with tiny flags appended, as a later flag wins. The cells of first_steps.ipynb run in order.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from rectified_flow.cli.model_flags import EvaluateConfig, ExportConfig, SampleConfig, WatchConfig
from rectified_flow.cli.programs import COMMAND, PROGRAMS
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
from rectified_flow.data import open as catalog
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.errors import UsageError
from rectified_flow.flags import flag_types
from rectified_flow.studio.flags import StudioConfig
from tests.patience import PATIENCE
from tests.programs import constant_speed, program, quick_frechet_distance, stand_in, without
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS: dict[str, type] = {
    "train_oxford.py": TrainConfig,
    "train_mean_flow.py": OneStepConfig,
    "sample.py": SampleConfig,
    "evaluate.py": EvaluateConfig,
    "export.py": ExportConfig,
    "watch.py": WatchConfig,
    "studio.py": StudioConfig,
}
CONSOLE_COMMANDS = {f"{COMMAND} {name}": f"{program.__name__}.py" for name, program in PROGRAMS.items()}
LAUNCH_SCRIPT = "scripts/run_multi_gpu_simple.sh"
RUN_ELSEWHERE = (LAUNCH_SCRIPT, "scripts/validate_setup.py")
"""Commands that need no mark, as tests/launch/test_programs.py runs them."""
ONLY_PARSED = {"--import": "the module is the reader's own"}
"""Flags of commands that are parsed and not run, and why."""
LAUNCHER_FLAGS = {
    *("cpu", "cpus", "exclusive", "local", "local_addr", "main_process_port", "max_restarts", "nnodes"),
    *("nproc_per_node", "num_machines", "num_processes", "requeue", "signal", "standalone", "time"),
}
"""Flags of torchrun, accelerate launch and Slurm that prose mentions."""

TINY_TRAINING = (
    "--dataset_path pictures --image_size 8 --dim 8 --dim_mults 1 --batch_size 4"
    " --num_samples 2 --sample_steps 1 --sample_every 0 --save_every 0 --log_with none --no_compile"
)
TINY_EVALUATION = "--num_samples 4 --steps 1 --feature_network efficientnet_lite0"
EVALUATION = "--evaluate_every 2 --evaluation_samples 4 --feature_network efficientnet_lite0"
TINY_IF_GIVEN = {
    "--budget": "--budget 2s --save_every 8 --batch_size 8",
    "--global_batch_size": "--global_batch_size 4",
    "--num_epochs": "--num_epochs 0.1",
    "--evaluate_every": EVALUATION,
    "--method reflow --teacher": "--teacher_samples 4 --teacher_steps 1",
    "--teacher": "--teacher_samples 8 --teacher_steps 2",
}
SLOW_PAGES = (
    *("docs/budget.md", "docs/mean_flow.md", "docs/training.md", "docs/sampling.md", "docs/measurements/budget.md"),
    "docs/latents.md",
)
"""Pages with long training runs. tests/cli/test_train_budget.py and tests/cli/test_teacher.py test the same flags."""
DEFAULT_OUTPUT = "runs/rectified-flow"
CLASSES = ("daisy", "rose", "sunflower")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    mark: str
    line: int
    text: str

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run:")


@dataclass(frozen=True)
class Command:
    """A command of a bash block: words up to a pipe or ``&&``, without the variables set in front of them."""

    words: list[str]
    is_run: bool
    line: int
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"line {self.line}: {' '.join(self.words)}"

    @property
    def script(self) -> str:
        """The script of this project that the command starts, or the first word of the command."""
        words = self.words[1:] if self.words[0] == "python" else self.words
        return CONSOLE_COMMANDS.get(words[0], words[0]) if words else "python"

    @property
    def program(self) -> tuple[str, list[str]] | None:
        """The program that this starts at last, directly or by a launcher, and its flags."""
        if self.script == LAUNCH_SCRIPT:
            flags = self.words[1:]
            flags = flags[1:] if flags and flags[0].isdecimal() else flags
            if "--max_restarts" in flags:
                at = flags.index("--max_restarts")
                flags = flags[:at] + flags[at + 2 :]
            return self.variables.get("PROGRAM", "train_oxford.py"), flags
        for at, word in enumerate(self.words):
            name = CONSOLE_COMMANDS.get(word, word)
            if name in CONFIGS:
                return name, self.words[at + 1 :]
        return None


def blocks_of(text: str) -> Iterator[Block]:
    for found in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(found[2], found[1] or "", text[: found.start()].count("\n") + 1, found[3])


def prose_of(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def commands_of(text: str) -> Iterator[Command]:
    """The commands of all bash blocks."""
    for block in blocks_of(text):
        yield from commands_in(block)


def commands_in(block: Block) -> Iterator[Command]:
    """The commands of a bash block, with the variables that earlier lines set."""
    variables: dict[str, str] = {}
    for written in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else []:
        expanded = Template(written).safe_substitute(variables)
        for part in [expanded] if "$(" in expanded else re.split(r" (?:&&|\|\|?|;) ", expanded):
            words = with_one_command(shlex.split(part, comments=True))
            own: dict[str, str] = {}
            while words and re.match(r"\w+=", words[0]):
                name, _, value = words.pop(0).partition("=")
                own[name] = value
            if words:
                yield Command(words, block.is_run, block.line, own)
            else:
                variables |= own


def with_one_command(words: list[str]) -> list[str]:
    """The words with ``rectified-flow train`` as one, also where a launcher starts it as a module."""
    for at, word in enumerate(words):
        if word in (COMMAND, "rectified_flow"):
            start = at - 1 if words[at - 1] == "-m" else at
            return [*words[:start], " ".join([COMMAND, *words[at + 1 : at + 2]]), *words[at + 2 :]]
    return words


# What is wrong with a page


def unknown_commands(text: str) -> list[str]:
    """Commands that nothing runs and no mark excuses."""
    return [
        str(each)
        for each in commands_of(text)
        if each.is_run and each.script not in CONFIGS and each.script not in RUN_ELSEWHERE
    ]


def unknown_flags(text: str) -> list[str]:
    """Commands with a flag, or a value of it, that does not exist, marked or not; and flags in prose."""
    wrong = [str(each) for each in commands_of(text) if not _is_valid(each)]
    known = LAUNCHER_FLAGS | {"help"} | {name for config in CONFIGS.values() for name in flag_types(config)}
    for file in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "studies/harness.py"]:
        known |= _fields(file)
    mentioned = re.findall(r"(?<![\w-])--([a-z]\w*)", prose_of(text))
    return wrong + [f"--{name} in prose" for name in mentioned if name.removeprefix("no_") not in known]


def _is_valid(command: Command) -> bool:
    if command.program is not None:
        name, flags = command.program
        if "--config" in flags:  # its file need not exist here
            at = flags.index("--config")
            flags = flags[:at] + flags[at + 2 :]
        try:
            read_settings(CONFIGS[name], "", flags, quiet=True)
        except SystemExit as end:
            return not end.code
        except UsageError:
            return False
        return True
    if command.words[0] == "make":
        return re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    is_study = command.script == "-m" and command.words[2].startswith("studies.")
    if is_study or command.script.startswith(("benchmarks/", "scripts/")):
        file = ROOT / (f"{command.words[2].replace('.', '/')}.py" if is_study else command.script)
        fields = _fields(ROOT / "studies/harness.py") if is_study else _fields(file) if file.exists() else set()
        given = {word[2:].partition("=")[0] for word in command.words if word.startswith("--")}
        return file.exists() and {name.removeprefix("no_") for name in given} <= fields
    return True


def _fields(file: Path) -> set[str]:
    """The fields of all classes in a file, which are its flags."""
    tree = ast.walk(ast.parse(file.read_text()))
    return {each.target.id for each in tree if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def broken_imports(text: str) -> list[str]:
    """Python blocks that do not compile, or import what does not exist."""
    wrong = []
    for block in blocks_of(text):
        try:
            tree = ast.parse(block.text) if block.language == "python" else ast.Module([], [])
            imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(list(imports), []), "imports", "exec"), {})
        except (SyntaxError, ImportError) as error:
            wrong.append(f"line {block.line}: {error}")
    return wrong


def dead_links(text: str, page: Path) -> list[str]:
    """Relative links to files or headings that do not exist."""
    wrong = []
    for link in re.findall(r"\[[^\]]*\]\(\s*([^)\s]+)\s*\)", prose_of(text)):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        there = text if target == page else target.read_text() if target.suffix == ".md" and target.exists() else ""
        if not (target == page or target.exists()) or (anchor and anchor not in _anchors(there)):
            wrong.append(link)
    return wrong


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in shown}


pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@pages
def test_nothing_on_the_page_is_unknown_to_the_code(page: Path) -> None:
    text = page.read_text()
    assert unknown_commands(text) == []
    if page.name != "CHANGELOG.md":  # names flags that are gone
        assert unknown_flags(text) == []
    assert broken_imports(text) == []


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "benchmarks/README.md", ROOT / "studies/README.md"], ids=lambda page: page.name
)
def test_links_resolve(page: Path) -> None:
    assert dead_links(page.read_text(), page) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pages
def test_programs_in_javascript_have_no_syntax_error(page: Path) -> None:
    for block in blocks_of(page.read_text()):
        if block.language == "js":
            command = ["node", "--input-type=module", "--check"]
            subprocess.run(command, input=block.text, text=True, check=True, timeout=PATIENCE)


def test_the_readme_installs_what_its_evaluation_needs() -> None:
    """The other feature network is downloaded when it is first used."""
    text = (ROOT / "README.md").read_text()
    [extras] = re.findall(r"pip install '\.\[([\w,]+)\]'", text)
    assert "evaluation" in extras.split(",")
    commands = re.findall(rf"{COMMAND} evaluate [^`\n]*", text)
    assert commands
    assert all("--feature_network efficientnet_lite0" in command for command in commands)


def test_the_console_commands_are_those_of_the_package() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.pop(COMMAND) == "rectified_flow.cli.programs:main"
    programs = {name: f"{where.partition(':')[2]}.py" for name, where in scripts.items()}
    assert programs == {name: script for name, script in CONSOLE_COMMANDS.items() if " " not in name}


# What runs


def tiny(name: str, flags: list[str]) -> list[str]:
    """The flags of a command with tiny ones after them."""
    flags = [re.sub(r"step_\d{8}", "step_00000002", each) for each in flags]
    if name == "export.py":
        return flags
    if name == "sample.py":
        return [*flags, "--num_samples", "2", "--steps", "1"]
    if name == "evaluate.py":
        return [*without("--steps", flags), *TINY_EVALUATION.split()]
    if "--dataset" in flags:  # other pictures take its place
        at = flags.index("--dataset")
        flags = flags[:at] + flags[at + 2 :]
    more = [words for flag, words in TINY_IF_GIVEN.items() if flag in flags]
    length = [] if {"--num_epochs", "--budget"} & set(flags) else ["--train_num_steps", "2"]
    return [*without("--dim_mults", flags), *TINY_TRAINING.split(), *length, *" ".join(more).split()]


def run_command(name: str, flags: list[str], folder: Path) -> None:
    """Run a command in a process of its own; training starts anew, unless the command resumes or only prints."""
    if name.startswith("train") and not {"--config", "--resume", "--dry_run", "--help"} & set(flags):
        where = flags[flags.index("--output_dir") + 1] if "--output_dir" in flags else DEFAULT_OUTPUT
        shutil.rmtree(folder / where, ignore_errors=True)
    [(code, output)] = run_on_ranks(1, _in_folder, name, tiny(name, flags), folder)
    assert code == 0, f"{name} {' '.join(flags)}\n{output}"


def _in_folder(name: str, flags: list[str], folder: Path) -> tuple[int, str]:
    os.chdir(folder)
    with constant_speed(), quick_frechet_distance(), stand_in():
        return program(name, flags)


def run_example(code: str, folder: Path) -> None:
    """Run an example in a process of its own; training starts anew if the example names no folder."""
    shutil.rmtree(folder / DEFAULT_OUTPUT, ignore_errors=True)
    run_on_ranks(1, _execute, code, folder)


def _execute(code: str, folder: Path) -> None:
    os.chdir(folder)
    setattr(catalog, "SyntheticFlowers", partial(SyntheticFlowers, count=64))  # noqa: B010 -- of a few flowers
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures of some classes, a run that takes labels, and one that does not."""
    folder = tmp_path_factory.mktemp("docs")
    generator = np.random.default_rng(0)
    for name in CLASSES:
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            picture = Image.fromarray(generator.integers(256, size=(8, 8, 3), dtype=np.uint8))
            picture.save(folder / "pictures" / name / f"{number}.png")
    picture.save(folder / "cat.jpg")
    run_command("train_oxford.py", [], folder)
    run_command("train_oxford.py", ["--use_cfg", "--output_dir", "runs/flowers"], folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if str(page.relative_to(ROOT)) in SLOW_PAGES else ()) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_the_blocks_of_a_page_run(page: Path, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    for block in blocks_of(page.read_text()):
        if (block.language, block.mark) == ("python", "run"):
            run_example(block.text, tmp_path)
        for command in commands_in(block):
            if command.is_run and command.script in CONFIGS and not ONLY_PARSED.keys() & set(command.words):
                assert command.program is not None
                run_command(*command.program, tmp_path)


NOTEBOOK = ROOT / "docs" / "first_steps.ipynb"
TINY_NOTEBOOK = """
pictures, data, steps = None, "--dataset synthetic-flowers", 6
size = "--image_size 16 --dim 16 --dim_mults 1 2"
"""


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def has_tag(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def test_the_notebook_is_kept_without_outputs(notebook: NotebookNode) -> None:
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_the_notebook_runs(notebook: NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook.cells = [cell for cell in notebook.cells if not has_tag(cell, "install")]
    [settings] = [cell for cell in notebook.cells if has_tag(cell, "parameters")]
    settings.source += TINY_NOTEBOOK
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(shown) == 1 + 3 + 1, "the loss, three grids and the samples"
    printed = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output)
    assert "Traceback" not in printed
    assert (tmp_path / "page.zip").exists()
