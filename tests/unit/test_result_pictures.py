"""Pictures of docs/results.md show the figures of its tables."""

from __future__ import annotations

import pytest

from scripts.result_pictures import DOCS, Chart, draw, pictures, table

PAGE = """# Results

## Speed

| mode | s |
|---|---|
| `a` | 1,000 |
| b < c | 500 |

| another |
|---|
| table |

## Else
"""


@pytest.mark.parametrize("name", pictures())
def test_a_picture_is_drawn_from_its_table(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == pictures()[name], "run python scripts/result_pictures.py"
    assert f"({name})" in (DOCS / "results.md").read_text(encoding="utf-8")


def test_bars_are_as_long_as_their_values() -> None:
    rows = table(PAGE, "Speed")
    assert rows == [["`a`", "1,000"], ["b < c", "500"]]
    picture = draw(Chart("Speed", "seconds", {"": 1}), rows)
    assert 'width="540.0"' in picture
    assert 'width="270.0"' in picture
    assert ">1,000</text>" in picture
    assert ">b &lt; c</text>" in picture


def test_a_section_without_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="must have a table with rows"):
        table(PAGE, "Else")
