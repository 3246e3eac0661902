"""Sizes of the project that show its design: lines, files, code, functions, and modules that only one other needs.

``python scripts/house.py`` prints a table of the working tree; with commits as arguments, a column for each of them:
``python scripts/house.py v0.2.0 HEAD``. ``tests/unit/test_house.py`` holds the numbers that were reached as limits.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"hvd_async": "*.py", "scripts": "*.py", "tests": "*.py", "docs": "*.md"}
"""Folders that are counted, and the files in them that are."""
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


class House(NamedTuple):
    """Sizes of one part of the project.

    Attributes:
        files: number of files.
        lines: lines in them, empty ones and comments included.
        tokens: tokens of code, without comments and docstrings.
        functions: functions and methods.
        median_body: lines of a function's body without its docstring, the median over all functions.
        single_importer: modules that exactly one other module of the part imports.
    """

    files: int
    lines: int
    tokens: int = 0
    functions: int = 0
    median_body: float = 0.0
    single_importer: int = 0


def measure(root: Path, part: str) -> House:
    """Return the sizes of a part of the project at ``root``; the fields on code are 0 where it has none."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / part).rglob(PARTS[part]))}
    lines = sum(len(text.splitlines()) for text in texts.values())
    if PARTS[part] != "*.py":
        return House(len(texts), lines)
    trees = {path: ast.parse(text) for path, text in texts.items()}
    tokens = sum(count_tokens(text, trees[path]) for path, text in texts.items())
    bodies = [length for tree in trees.values() for length in body_lengths(tree)]
    modules = {module_of(path.relative_to(root)): (path, tree) for path, tree in trees.items()}
    return House(len(texts), lines, tokens, len(bodies), statistics.median(bodies), len(single_importers(modules)))


def count_tokens(text: str, tree: ast.Module) -> int:
    """Return the number of tokens of code: no comments, docstrings (strings that are statements), or layout."""
    strings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type not in LAYOUT and token.type != tokenize.COMMENT and token.start not in strings for token in tokens
    )


def body_lengths(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of each function's body without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def single_importers(modules: Mapping[str, tuple[Path, ast.Module]]) -> list[str]:
    """Return the modules that exactly one other imports, among these."""
    importers: Counter[str] = Counter()
    for name, (_, tree) in modules.items():
        importers.update(imported(tree, modules) - {name})
    return sorted(name for name, count in importers.items() if count == 1)


def imported(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """Return the names among ``modules`` that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & set(modules)


def module_of(path: Path) -> str:
    """Return the dotted name of a module by its path inside the project."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_commit(commit: str) -> dict[str, House]:
    """Return the sizes of all parts at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, *PARTS], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return measure_all(Path(folder))


def measure_all(root: Path) -> dict[str, House]:
    """Return the sizes of all parts of the project at ``root``."""
    return {part: measure(root, part) for part in PARTS}


def table(columns: Mapping[str, Mapping[str, House]]) -> str:
    """Return a Markdown table: a column for each state of the project."""
    rows = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for part in PARTS:
        for field in House._fields:
            values = [getattr(sizes[part], field) for sizes in columns.values()]
            if any(values):
                rows.append(f"| `{part}/` {field.replace('_', ' ')} | " + " | ".join(f"{v:,g}" for v in values) + " |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("commits", nargs="*", help="commits to count; none: the working tree")
    commits = parser.parse_args(arguments).commits
    print(table({commit: at_commit(commit) for commit in commits} or {"now": measure_all(ROOT)}))


if __name__ == "__main__":
    main(sys.argv[1:])
