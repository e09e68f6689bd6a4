"""Count the house: files, lines and imports of the package, and what makes its code hard to change.

``make house`` prints the table. ``tests/test_architecture.py`` sets a limit to some of the numbers.
"""

import ast
import io
import re
import sys
import tokenize
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tyro.conf import Fixed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "rectified_flow"
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def files_in(*folders: str) -> list[Path]:
    """Return the Python files below some folders of the project."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def code_lines(path: Path) -> int:
    """Count the lines that are neither blank nor a comment nor part of a docstring."""
    text = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def comments(path: Path) -> int:
    """Count the comments, on a line of their own or behind code."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(token.type == tokenize.COMMENT and not token.string.startswith("# noqa") for token in tokens)


def nodes_of(paths: list[Path]) -> list[ast.AST]:
    """Return the nodes of the syntax trees of some files."""
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def functions(paths: list[Path]) -> list[ast.FunctionDef]:
    """Return the functions and methods in some files."""
    return [node for node in nodes_of(paths) if isinstance(node, ast.FunctionDef)]


def takes_all_settings(function: ast.FunctionDef) -> bool:
    """Return whether a function takes all flags of the training program."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [ast.unparse(each.annotation) for each in parameters if each.annotation is not None]
    return any(re.search(r"\b(TrainConfig|Settings)\b", each) for each in annotations)


def untyped(paths: list[Path]) -> int:
    """Count ``Any`` in annotations and types."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes_of(paths))


def flag_strings(paths: list[Path]) -> int:
    """Count the strings that spell a flag of a program, or the dashes before the name of one, docstrings included."""
    texts = [node.value for node in nodes_of(paths) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return sum(bool(re.search(r"--([a-z]|$)", text)) for text in texts)


def imports_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found.add(str(node.module))
    return found


def circle(paths: list[Path]) -> list[str]:
    """Return folders of the package that import each other in a circle, of any length; empty if there are none."""
    arrows: dict[str, set[str]] = {}
    for path in paths:
        here = path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        to = {module.split(".")[1] for module in imports_of(path) if module.count(".")}
        arrows[here] = arrows.get(here, set()) | to - {here}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def lines_in(*folders: str) -> int:
    """Count all lines of the Python files below some folders."""
    return sum(len(path.read_text().splitlines()) for path in files_in(*folders))


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(ROOT))
    from rectified_flow.cli.training_flags import OneStepConfig, TrainConfig
    from rectified_flow.flags import flag_types

    configs = [flag_types(each).values() for each in (TrainConfig, OneStepConfig)]
    flags = [sum(Fixed not in getattr(each, "__metadata__", ()) for each in types) for types in configs]
    package = files_in(PACKAGE)
    code = sum(map(code_lines, package))
    raising = sum(isinstance(node, ast.Raise | ast.ExceptHandler) for node in nodes_of(package))
    elsewhere = [path for path in package if not path.is_relative_to(ROOT / PACKAGE / "cli")]
    table = {
        "package: files, lines, code lines": f"{len(package)}, {lines_in(PACKAGE):,}, {code:,}",
        "imports of the package, a file": f"{sum(len(imports_of(path)) for path in package) / len(package):.1f}",
        "lines that raise or except, per 100 of code": f"{100 * raising / code:.1f}",
        "comments, per 100 lines": f"{100 * sum(map(comments, package)) / lines_in(PACKAGE):.1f}",
        "functions that take all settings": str(sum(map(takes_all_settings, functions(package)))),
        "Any in types": str(untyped(package)),
        "strings with a flag outside of cli": str(flag_strings(elsewhere)),
        "flags of train, of one-step": ", ".join(map(str, flags)),
        "tests: lines": f"{lines_in('tests'):,}",
        "benchmarks, studies, examples: lines": f"{lines_in('benchmarks', 'studies', 'examples'):,}",
        "a circle of folders": ", ".join(circle(package)) or "none",
    }
    for name, value in table.items():
        print(f"{name:<46} {value}")


if __name__ == "__main__":
    main()
