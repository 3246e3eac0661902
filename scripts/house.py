"""Sizes of the project that show its design: lines, files, code, functions, and modules that only one other needs.

``python scripts/house.py`` prints a table of the working tree; with commits as arguments, a column for each of them:
``python scripts/house.py v0.2.0 HEAD``. ``--walk`` prints the functions that a gradient crosses instead.
``tests/unit/test_house.py`` holds the numbers that were reached as limits.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

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
    """Return the sizes of a part of the project at ``root``, or of a package in it; the fields on code are 0 where it
    has none."""
    kind = PARTS[part.partition("/")[0]]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / part).rglob(kind))}
    lines = sum(len(text.splitlines()) for text in texts.values())
    if kind != "*.py":
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


# -- the walk of a gradient -------------------------------------------------------------------------------------------

LIBRARY = ROOT / "hvd_async"
STAND_IN = "testing.py", "in_memory.py"
"""Files of the library whose functions do not count: they take the place of ZeroMQ and of Horovod."""
STEPS = 6
QUIET_S = 0.05
"""Seconds in which the threads of a job come to rest."""


class Call(NamedTuple):
    """Call of a function of the library.

    Attributes:
        thread: "rank", "engine" or "coordinator".
        file: path inside the library.
        name: qualified name of the function.
    """

    thread: str
    file: str
    name: str


def walk() -> list[Call]:
    """Return the calls, in order, by which one rank's gradient is handed over, reduced by a round with
    ``quorum="solo"``, and applied by ``step()``: in the core alone, with NumPy and without a network.

    The shortest of several steps counts. Comprehensions belong to the function around them.
    """
    import numpy as np

    from hvd_async.algorithms.eager.config import EagerConfig
    from hvd_async.algorithms.eager.gradient_format import GradientFormat
    from hvd_async.algorithms.eager.rank import EagerWorker
    from hvd_async.runtime.lifecycle import local_engine
    from hvd_async.testing import Cluster

    calls: list[tuple[str, CodeType]] = []

    def on_event(frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(LIBRARY)) and not code.co_filename.endswith(STAND_IN):
            calls.append((threading.current_thread().name, code))

    def train(rank: int) -> list[list[tuple[str, CodeType]]]:
        engine = local_engine()
        assert engine is not None
        wire = GradientFormat(zeros=lambda bucket: np.zeros(2), nbytes=(16,))
        worker = EagerWorker(engine, EagerConfig("solo", 2, 0.0, 0, 1), wire, lambda flush: None)
        worker.connect(["w"], [1])
        steps = []
        for _ in range(STEPS):
            time.sleep(QUIET_S)
            calls.clear()
            worker.hand_over(0, np.ones(2))
            time.sleep(QUIET_S)
            worker.step({}, [{"lr": 1.0}])
            time.sleep(QUIET_S)
            steps.append(calls.copy())
        worker.drain()
        return steps

    threading.setprofile(on_event)
    try:
        (steps,) = Cluster(1).run(train)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return [
        Call(_thread_kind(thread), str(Path(code.co_filename).relative_to(LIBRARY)), code.co_qualname)
        for thread, code in min(steps, key=len)
        if not code.co_name.startswith("<") or code.co_name == "<lambda>"
    ]


def _thread_kind(name: str) -> str:
    """Return the last word of a thread's name: "rank-0", "hvd_async-engine-0", "hvd_async-coordinator"."""
    return next(part for part in reversed(name.split("-")) if not part.isdigit())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or the walk of a gradient."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("commits", nargs="*", help="commits to count; none: the working tree")
    parser.add_argument("--walk", action="store_true", help="print the functions that a gradient crosses")
    options = parser.parse_args(arguments)
    if options.walk:
        calls = walk()
        print(*(f"{thread:12} {file:38} {name}" for thread, file, name in calls), sep="\n")
        print(f"{len({call[1:] for call in calls})} functions, {len(calls)} calls")
        return
    print(table({commit: at_commit(commit) for commit in options.commits} or {"now": measure_all(ROOT)}))


if __name__ == "__main__":
    main(sys.argv[1:])
