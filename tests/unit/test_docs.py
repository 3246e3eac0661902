"""What the pages say: their links, how they are set, and that the messages they explain are the library's."""

from __future__ import annotations

import ast
import pathlib
import re
from functools import cache

import pytest

from hvd_async import errors

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "scripts" / "slurm" / "README.md",
    ROOT / "scripts" / "benchmarks" / "figures.md",
    ROOT / "scripts" / "benchmarks" / "measurements.md",
]
TROUBLE = [ROOT / "docs" / name for name in ("troubleshooting.md", "troubleshooting_training.md")]
GAP = "\0"
"""In a message of the source: a part that is put in when it is raised."""
identify = {"ids": lambda path: str(path.relative_to(ROOT))}


def links(page: pathlib.Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))


def anchors(page: pathlib.Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, **identify)
def test_links_lead_somewhere(page):
    for link in links(page):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links {link}, and there is no such heading"


@pytest.mark.parametrize("page", PAGES, **identify)
def test_other_projects_are_linked_at_home(page):
    assert not [link for link in links(page) if "pypi.org" in link], "link the project's repository or its paper"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], **identify)
def test_lines_are_short_outside_of_tables(page):
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    long = [number for number, line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long, f"{page.name}, lines {long}"


def test_every_page_is_linked_from_another():
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert not [page.name for page in PAGES if page not in linked and page.name != "README.md"]


@pytest.mark.parametrize("page", ["adding_an_algorithm.md", "install.md", "clusters.md"])
def test_files_that_are_named_are_there(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:hvd_async|tests|scripts|docs)/[\w./]+\.(?:py|sh|sbatch|md))`", text)
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_the_readme_is_for_five_minutes():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 115
    assert max(map(len, lines)) <= 120
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert not [cell for cell in cells if len(re.findall(r"\d[\d.,]*", cell)) >= 3]


# -- messages -------------------------------------------------------------------------------------------------


def text_of(node: ast.AST) -> str | None:
    """The text of a string in the source, GAP for each part that is put in; None if it is none."""
    if isinstance(node, ast.JoinedStr):
        parts = [text_of(value) if isinstance(value, ast.Constant) else GAP for value in node.values]
        return "".join(part or "" for part in parts)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def messages() -> dict[str, bool]:
    """The strings of the library: whether each must be in the pages about errors.

    Those must that are given to an error of its own, or to a warning. ProtocolError is for the coordinator, and what is
    called a bug speaks for itself. A message that is put together of other strings is known by these.
    """
    own = {name for name, kind in vars(errors).items() if isinstance(kind, type)} - {"ProtocolError"}
    found: dict[str, bool] = {}
    for path in sorted((ROOT / "hvd_async").rglob("*.py")):
        if path.parent.name == "runner" or path.name == "testing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = text_of(node)
            if text is not None:
                found.setdefault(text, False)
            if isinstance(node, ast.Call) and node.args:
                given = text_of(node.args[0])
                called = ast.unparse(node.func)
                is_shown = called in own or called in ("warn", "warnings.warn")
                if given is not None and is_shown and "a bug in" not in given and max(map(len, given.split(GAP))) > 20:
                    found[given] = True
    return found


def explained() -> list[str]:
    """The messages that the pages about errors explain: in backquotes in the first column of a section's table."""
    sections = [path.read_text(encoding="utf-8").partition("\n## ")[2] for path in TROUBLE]
    cells = [cell for text in sections for cell in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def quoted(fragment: str, message: str) -> bool:
    """Whether a message has the parts of a fragment between its "...", in order."""
    rest = message
    for part in filter(None, map(str.strip, fragment.split("..."))):
        _, found, rest = rest.partition(part)
        if not found:
            return False
    return True


def test_every_message_that_is_explained_is_in_the_source():
    unknown = [fragment for fragment in explained() if not any(quoted(fragment, message) for message in messages())]
    assert not unknown, "not in hvd_async/"


def test_every_error_and_warning_of_the_library_is_explained():
    missing = [
        message.replace(GAP, "...")
        for message, wanted in messages().items()
        if wanted and not any(quoted(fragment, message) for fragment in explained())
    ]
    assert not missing, f"add to {TROUBLE[0].name} or {TROUBLE[1].name}: {missing}"


def test_every_class_of_error_is_in_the_table():
    text = TROUBLE[0].read_text(encoding="utf-8")
    for name, kind in vars(errors).items():
        assert not (isinstance(kind, type) and issubclass(kind, Exception)) or f"`{name}`" in text, name


def test_a_fragment_that_is_not_in_the_source_is_found():
    """So that the tests above cannot be passed by an empty reading."""
    assert len(explained()) > 80
    assert sum(messages().values()) > 30
    assert not [message for message in messages() if quoted("the coordinator is ... made of cheese", message)]
    assert quoted("step ... of", f"a step {GAP} of rank 3")
    assert not quoted("of ... step", f"a step {GAP} of rank 3")
