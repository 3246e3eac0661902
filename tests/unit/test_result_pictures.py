"""Pictures of docs/results.md show the figures of its tables."""

from __future__ import annotations

import re

import pytest

from scripts.result_pictures import CHARTS, DOCS, draw, table

PAGE = (DOCS / "results.md").read_text(encoding="utf-8")


def texts(picture: str) -> list[str]:
    """Return the texts of an SVG."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


@pytest.mark.parametrize("name", CHARTS)
def test_a_picture_has_the_figures_of_its_table(name: str, tmp_path) -> None:
    rows = table(PAGE, CHARTS[name].heading)
    draw(CHARTS[name], rows, tmp_path / name)
    kept, drawn = (texts((folder / name).read_text(encoding="utf-8")) for folder in (DOCS, tmp_path))
    assert kept == drawn, "run python scripts/result_pictures.py"
    assert {CHARTS[name].title, *(row[column] for row in rows for column in CHARTS[name].series.values())} <= {*kept}
    assert f"({name})" in PAGE


def test_a_section_without_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="must have a table with rows"):
        table("# Results\n\n## Else\n", "Else")
