"""The documentation as a site: all pages and public names are in it, its links lead somewhere, it needs no network."""

from __future__ import annotations

import ast
import html.parser
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse
import zlib

import pytest

from scripts.website import api, repository_links, sequence_diagram

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="what builds the site is not installed: pip install -e '.[docs]'",
)
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "use": "href"}
"""Attributes whose target a browser fetches automatically; of ``link`` its href."""


class Page(html.parser.HTMLParser):
    """What a page links, what a browser loads for it, and its anchors."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given["href"])
        if tag in LOADING and LOADING[tag] in given:
            self.loaded.append(given[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as scripts/site.sh does."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # (--quiet hides warnings from it)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """All pages of the site by their path; not the one for pages that are not there, which knows no folder."""
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


@pytest.fixture(scope="module")
def inventory(site):
    """By name the target of everything that the API documents."""
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    lines = [line.split(" ", 4) for line in zlib.decompress(packed).decode().splitlines()]
    return {name: target.replace("$", name) for name, _, _, target, _ in lines}


@needs_mkdocs
def test_every_public_name_is_documented_where_the_inventory_says(site, inventory, pages):
    """(That pages name all that is public is tests/conformance/test_public_names.py's.)"""
    names = re.findall(r"^::: (\S+)$", "".join(api.pages().values()), re.MULTILINE)
    assert len(names) > 70
    for name in names:
        file, _, anchor = inventory[name].partition("#")
        assert anchor in pages[site / file].anchors, name


@needs_mkdocs
def test_so_are_the_methods_of_wrapped_optimizers(inventory):
    for classes in api.METHODS.values():
        for path in classes.values():
            module, _, kind = f"hvd_async.{path}".rpartition(".")
            body = next(node.body for node in api.tree(module).body if getattr(node, "name", "") == kind)
            methods = [node.name for node in body if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
            missing = [name for name in methods if name[0] != "_" and f"{module}.{kind}.{name}" not in inventory]
            assert not missing, f"{kind}: {missing}"


@needs_mkdocs
def test_every_page_is_reached_from_the_first_one(site, pages):
    waiting, seen = [site / "index.html"], set()
    while waiting:
        path = waiting.pop()
        if path in seen or path not in pages:
            continue
        seen.add(path)
        links = [urllib.parse.urlsplit(link) for link in pages[path].links]
        waiting += [(path.parent / link.path).resolve() for link in links if link.path and not link.scheme]
    assert {site / f"{page.stem}.html" for page in DOCS} <= seen
    assert not pages.keys() - seen


@needs_mkdocs
def test_links_lead_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urllib.parse.urlsplit(link)
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme:
                continue
            anchors = pages[target].anchors if target in pages else {parts.fragment}
            if not target.is_file() or (parts.fragment and parts.fragment not in anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


@needs_mkdocs
def test_nothing_is_fetched_from_elsewhere(site, pages):
    assert not [f"{path.name}: {link}" for path, page in pages.items() for link in page.loaded if "//" in link]
    outside = re.compile(r"(@import|url\()\s*[\"']?(https?:)?//")
    styles = [path.name for path in site.rglob("*.css") if outside.search(path.read_text(encoding="utf-8"))]
    assert not styles


@needs_mkdocs
def test_the_search_works_without_a_server_and_diagrams_are_drawn(site, pages):
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    places = {entry["location"].partition("#")[0] for entry in json.loads(text.removeprefix("var __index = "))["docs"]}
    assert {*(f"{page.stem}.html" for page in DOCS), "api/torch.html"} <= places
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    assert texts["concepts.html"].count('<svg class="sequence"') == 3
    assert not [name for name, text in texts.items() if "sequenceDiagram" in text]


# -- without the build ----------------------------------------------------------------------------------------


def test_links_are_moved():
    text = "[a](eager.md#hosts) [b](../scripts/slurm/README.md) [c](examples/torch_eager.py) "
    text += "[d](https://x.org/y.md) [e](#f)"
    assert repository_links.moved("index.md", text) == (
        "[a](eager.md#hosts) [b](files/scripts/slurm/README.md) [c](files/docs/examples/torch_eager.py.md) "
        "[d](https://x.org/y.md) [e](#f)"
    )
    assert repository_links.moved("files/scripts/slurm/README.md", "[a](../../docs/clusters.md) [b](train.sbatch)") == (
        "[a](../../../clusters.md) [b](train.sbatch.md)"
    )
    assert repository_links.moved("files/docs/examples/index.md", "[a](x.py) [b](keras_eager.py)") == (
        "[a](x.py) [b](keras_eager.py.md)"
    )
    assert repository_links.moved("index.md", "[a](../README.md)") == "[a](index.md)"
    assert repository_links.moved("index.md", "[a](nowhere.md)") == "[a](nowhere.md)"  # which the build reports


def test_a_diagram_is_drawn():
    text = "sequenceDiagram\n  participant A as rank 0\n  participant B as <b>\n"
    text += "  A->>B: hello\n  B->>B: on\n  Note over A,B: end"
    drawing = sequence_diagram.draw(text)
    assert [words for words in ("rank 0", "&lt;b&gt;", "hello", "on", "end") if f">{words}</text>" not in drawing] == []
    assert drawing.count('class="tip"') == 2
    assert drawing.count('class="life"') == 2
    assert sequence_diagram.drawn(f"x\n\n```mermaid\n{text}\n```\n\ny") == f"x\n\n{drawing}\n\ny"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("graph TD\n  A-->B", "only sequenceDiagram can be drawn"),
        ("sequenceDiagram\n  loop each step", "write a participant, a message"),
        ("sequenceDiagram\n  participant A as a\n  A->>C: x", "C is no participant; they are A"),
    ],
)
def test_what_cannot_be_drawn_is_said(text, hint):
    with pytest.raises(ValueError, match=hint):
        sequence_diagram.draw(text)
