"""Sizes of the project do not grow unnoticed, and are counted right; nor does the way of a gradient."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.house import House, body_lengths, count_tokens, measure, single_importers, walk

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "hvd_async": House(files=160, lines=43_095, tokens=255_920, functions=3_188, median_body=3, single_importer=22),
    "scripts": House(files=53, lines=10_358, tokens=75_760, functions=642, median_body=4, single_importer=6),
    "tests": House(files=303, lines=50_961, tokens=425_372, functions=4_040, median_body=5, single_importer=20),
    "docs": House(files=32, lines=3_406),
}
"""The sizes that were reached, rounded up; of ``median_body``, which is to rise, the least value.

A change that lowers a size lowers its limit too; one that raises a limit says in its commit why the size has to grow.
"""
CORE = {
    "algorithms": 68_850,
    "monitor": 5_670,
    "optimizers": 17_390,  # (a loaded momentum outlives a loss; broken ends and late switches are refused)
    "runtime": 34_735,
    "tensorflow": 30_540,  # (variables of equal names are saved, and registered optimizers load)
    "torch": 46_125,  # (gradients and loaded state lie in memory as their parameters)
    "traces": 4_630,
}
APPLICATIONS = {"advisor": 5_105, "cli": 4_360, "doctor": 7_660, "runner": 15_140, "simulation": 7_040}
"""Tokens of code that each package may have. A change that raises one says in a comment behind it what for."""


@pytest.mark.parametrize("part", LIMITS)
def test_no_size_grows_unnoticed(part: str) -> None:
    found, limit = measure(ROOT, part), LIMITS[part]
    grown = {
        field: f"{getattr(found, field):,} of {getattr(limit, field):,}"
        for field in set(House._fields) - {"median_body"}
        if getattr(found, field) > getattr(limit, field)
    }
    assert not grown, (
        f"{part} has grown: see python scripts/house.py, and merge or cut, or raise the limit with a reason"
    )
    assert found.median_body >= limit.median_body


def test_no_package_outgrows_its_budget() -> None:
    found = {package: measure(ROOT, f"hvd_async/{package}").tokens for package in CORE | APPLICATIONS}
    assert {package: tokens for package, tokens in found.items() if tokens > (CORE | APPLICATIONS)[package]} == {}
    assert set(found) == {path.parent.name for path in (ROOT / "hvd_async").glob("*/__init__.py")}


MOST_FUNCTIONS, MOST_CALLS = 105, 185
"""Functions that a gradient crosses in the core, and calls of them: reached, and to fall further."""


def test_the_way_of_a_gradient_does_not_grow() -> None:
    calls = walk()
    assert {call.thread for call in calls} == {"rank", "engine", "coordinator"}
    assert len({call[1:] for call in calls}) <= MOST_FUNCTIONS, "see python scripts/house.py --walk"
    assert len(calls) <= MOST_CALLS, "see python scripts/house.py --walk"


CODE = '''"""A module."""
import a.c  # why
X = 1
"""An attribute."""

def f(x):
    """A function."""
    y = (x +
         "s")
    return y

class C:
    def g(self): pass
'''


def test_code_is_counted_without_comments_docstrings_and_layout() -> None:
    tree = ast.parse(CODE)
    code = "import a . c X = 1 def f ( x ) : y = ( x + 's' ) return y class C : def g ( self ) : pass"
    assert count_tokens(CODE, tree) == len(code.split(" "))
    assert list(body_lengths(tree)) == [3, 1]


def test_a_module_that_one_other_imports_is_found() -> None:
    sources = {
        "p.a": "from p import b, c\nfrom p.d import e",
        "p.b": "import p.c",
        "p.c": "from p import c",
        "p.d": "def f():\n    from p.a import g",
    }
    modules = {name: (Path(name), ast.parse(text)) for name, text in sources.items()}
    assert single_importers(modules) == ["p.a", "p.b", "p.d"]
