"""What the pages in docs/ link to."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
identify = {"ids": lambda path: path.name}


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
