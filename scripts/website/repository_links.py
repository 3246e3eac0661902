"""Links of pages to files that are not in docs/: on the site each of these files is a page as well."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+://|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
"""The target of a relative link, and its anchor."""
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".md": "markdown", ".toml": "toml", ".yml": "yaml"}
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "scripts/benchmarks/measurements.md")
"""They are in the site's navigation."""


def uri_of(path: str) -> str:
    """Return where a file or folder of the repository is on the site, as the name of its source.

    Args:
        path: from the repository's root, with slashes.
    """
    if path == "README.md":
        return "index.md"  # which says the same, and more
    suffix = pathlib.PurePosixPath(path).suffix
    if path.startswith("docs/") and (suffix == ".md" or suffix in PICTURES):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}" if suffix == ".md" else f"files/{path}.md"


def path_of(uri: str) -> str:
    """Return the repository's file that a page of the site shows; ``uri_of`` of it is the page."""
    if not uri.startswith("files/"):
        return f"docs/{uri}"
    path = uri.removeprefix("files/")
    return path if (ROOT / path).exists() else path.removesuffix("/index.md").removesuffix(".md")


def _leads_to(path: str, link: str) -> str:
    """Return the path that a link of a file names; a folder's links begin in it."""
    folder = path if (ROOT / path).is_dir() else os.path.dirname(path)
    return os.path.normpath(os.path.join(folder, link))


def targets(path: str, text: str) -> Iterator[str]:
    """Yield the repository's files that a page links, as paths from its root, if they exist."""
    for found in LINK.finditer(text):
        target = _leads_to(path, found[1])
        if (ROOT / target).exists():
            yield target


def moved(uri: str, markdown: str) -> str:
    """Return a page's text with links that lead to the same files on the site."""
    path = path_of(uri)

    def link(found: re.Match[str]) -> str:
        target = _leads_to(path, found[1])
        if not (ROOT / target).exists():
            return found[0]  # (a page that is made of the source, or a mistake, which the build reports)
        return os.path.relpath(uri_of(target), os.path.dirname(uri) or ".") + (found[2] or "")

    return LINK.sub(link, markdown)


def page(path: str) -> str:
    """Return the Markdown that shows a file or folder of the repository."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if entry.is_file())
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"# {path}\n\n`````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n`````\n"


def linked_files(pages: Iterable[str]) -> dict[str, str]:
    """Return the pages that these pages of docs/ need besides themselves, by the name of their source.

    Args:
        pages: names in docs/.
    """
    texts = {f"docs/{name}": (ROOT / "docs" / name).read_text(encoding="utf-8") for name in pages}
    made: dict[str, str] = {}
    known = {uri_of(path) for path in texts}
    waiting = [*ALWAYS, *(target for path, text in texts.items() for target in targets(path, text))]
    while waiting:
        path = waiting.pop()
        uri = uri_of(path)
        if uri in known or pathlib.PurePosixPath(uri).suffix in PICTURES:
            continue
        known.add(uri)
        made[uri] = page(path)
        waiting += targets(path, made[uri])
    return made
