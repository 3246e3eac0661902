"""The documentation as a site: it is built, all public names are in it, and it needs no network.

The build itself refuses links that lead nowhere and pages outside of the navigation (``validation`` in mkdocs.yml).
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import zlib

import pytest

from scripts.website import api, repository_links, sequence_diagram

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
LOADED = re.compile(
    r'<(?:(?:script|img|iframe|source|use)\b|link\b[^>]* rel="(?:icon|stylesheet)")[^>]* (?:src|href)="([^"#]+)'
)
"""Addresses that a browser fetches for a page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as scripts/site.sh does."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="what builds the site is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # (--quiet hides warnings)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """The text of all pages by their path; not of the one for pages that are not there, which knows no folder."""
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    return {path: path.read_text(encoding="utf-8") for path in paths}


@pytest.fixture(scope="module")
def inventory(site):
    """By name the target of everything that the API documents."""
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    lines = [line.split(" ", 4) for line in zlib.decompress(packed).decode().splitlines()]
    return {name: target.replace("$", name) for name, _, _, target, _ in lines}


def test_every_public_name_is_documented_where_the_inventory_says(site, inventory, pages):
    """(That pages name all that is public is tests/conformance/test_public_names.py's.)"""
    names = re.findall(r"^::: (\S+)$", "".join(api.pages().values()), re.MULTILINE)
    assert len(names) > 70
    for name in names:
        file, _, anchor = inventory[name].partition("#")
        assert f'id="{anchor}"' in pages[site / file], name


def test_so_are_the_methods_of_wrapped_optimizers(inventory):
    for classes in api.METHODS.values():
        for path in classes.values():
            module, _, kind = f"hvd_async.{path}".rpartition(".")
            body = next(node.body for node in api.tree(module).body if getattr(node, "name", "") == kind)
            methods = [node.name for node in body if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
            missing = [name for name in methods if name[0] != "_" and f"{module}.{kind}.{name}" not in inventory]
            assert not missing, f"{kind}: {missing}"


def test_nothing_is_fetched_from_elsewhere(site, pages):
    loaded = {(path.parent / target).resolve() for path, text in pages.items() for target in LOADED.findall(text)}
    assert len(loaded) > 5
    assert not [path for path in loaded if not path.is_file()]
    outside = re.compile(r"(@import|url\()\s*[\"']?(https?:)?//")
    assert not [path.name for path in site.rglob("*.css") if outside.search(path.read_text(encoding="utf-8"))]


def test_the_search_works_without_a_server_and_diagrams_are_drawn(site, pages):
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    places = {entry["location"].partition("#")[0] for entry in json.loads(text.removeprefix("var __index = "))["docs"]}
    assert {*(f"{page.stem}.html" for page in DOCS), "api/torch.html"} <= places
    assert pages[site / "concepts.html"].count('<svg class="sequence"') == 3
    assert not [path.name for path, text in pages.items() if "sequenceDiagram" in text]


# -- without the build ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("index.md", "eager.md#hosts", "eager.md#hosts"),
        ("index.md", "https://x.org/y.md", "https://x.org/y.md"),
        ("index.md", "#f", "#f"),
        ("index.md", "nowhere.md", "nowhere.md"),  # (which the build reports)
        ("index.md", "../README.md", "index.md"),
        ("index.md", "../scripts/slurm/README.md", "files/scripts/slurm/README.md"),
        ("index.md", "examples/torch_eager.py", "files/docs/examples/torch_eager.py.md"),
        ("files/scripts/slurm/README.md", "../../docs/clusters.md", "../../../clusters.md"),
        ("files/scripts/slurm/README.md", "train.sbatch", "train.sbatch.md"),
        ("files/docs/examples/index.md", "x.py", "x.py"),
        ("files/docs/examples/index.md", "keras_eager.py", "keras_eager.py.md"),
    ],
)
def test_links_are_moved(page, link, moved):
    assert repository_links.moved(page, f"a [b]({link}) c") == f"a [b]({moved}) c"


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
