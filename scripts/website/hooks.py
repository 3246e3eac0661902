"""Hooks that MkDocs calls while it builds the site: the pages that are made of the source, links and diagrams."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # (MkDocs loads this file by its path)

from scripts.website import api, repository_links, sequence_diagram  # noqa: E402

ASSETS = ("iframe-worker.js", "style.css")


def on_files(files: Files, config: Any) -> Files:
    """Add the API, files that pages link outside of docs/, and the site's style and script."""
    pages = [file.src_uri for file in files.documentation_pages()]
    for uri, text in api.pages().items():
        files.append(File.generated(config, uri, content=text))
    for uri, text in repository_links.linked_files(pages).items():
        listed = repository_links.path_of(uri) in repository_links.ALWAYS
        level = InclusionLevel.UNDEFINED if listed else InclusionLevel.NOT_IN_NAV  # (links lead there)
        files.append(File.generated(config, uri, content=text, inclusion=level))
    for name in ASSETS:
        source = ROOT / "scripts" / "website" / name
        files.append(File.generated(config, f"assets/website/{name}", content=source.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Draw a page's diagrams, and have its links lead to the same files on the site."""
    return sequence_diagram.drawn(repository_links.moved(page.file.src_uri, markdown))
