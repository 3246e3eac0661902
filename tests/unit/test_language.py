"""Documents, and later code, are written in plain English: words of the project's former dialect do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.stem != "measurements")]
"""Pages without a single forbidden word. (measurements.md is not for users.)"""
CODE = ("hvd_async", "scripts", "tests")
"""Folders of code without one."""
FORBIDDEN = {
    r"so many": "a number, or n",
    r"so manieth": "every n",
    r"told": "sent, reported",
    r"those that": "name them: ranks that",
    r"whoever": "any rank that",
    r"such as have": "ranks with",
    r"in place of": "instead of",
    r"at the (most|least)": "at most, at least",
    r"mend(s|ed|ing)?": "fix",
    r"for people": "human-readable",
    r"given away": "transferred",
    r"come[s]? to (its|their) end": "finish",
    r"stands? for (all|what|the)": "represent, the consensus",
    r"last others|ranks are others|become others": "membership change",
    r"takes? it that": "assume that",
    r"now another": "random stragglers",
    r"makes? whom|who waits for whom": "which rank is the straggler",
    r"by (itself|themselves)": "separately, automatically",
    r"go(es)? on|going on|went on": "continue",
    r"is no (number|port|file|time)": "must be ..., got ...",
    r"has no use for": "does not support",
    r"as ever": "as usual, unchanged",
    r"but for": "except for",
    r"no ?body|somebody": "no rank, a rank",
    r"lets? go of": "release, close",
    r"anew": "again",
    r"beside": "with, compared with, next to",
    r"of (ours|yours)": "this library's, your",
    r"the news": "a noun that says of what",
}
"""Patterns of words, and what to write instead."""
PATTERN = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in FORBIDDEN), re.IGNORECASE)


def prose(page: str) -> str:
    """Return a page without its code, which quotes messages, and without the targets of its links."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`]*`", "", page)
    return re.sub(r"\]\([^)]*\)", "]", page)


def words(source: str) -> str:
    """Return what people read in a module: names with spaces for underscores, strings and comments."""
    of_f_strings = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # (Python 3.12 splits f-strings)
    read = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT, of_f_strings)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(re.sub(r"[\s_#]+", " ", token.string) for token in tokens if token.type in read)


def hits(text: str) -> list[str]:
    """Return the forbidden words of a text, in lower case, with any white space between them as one space."""
    return [re.sub(r"\s+", " ", match[0]).lower() for match in PATTERN.finditer(re.sub(r"\s+", " ", text))]


def instead(hit: str) -> str:
    """Return what to write instead of a forbidden word."""
    return next(text for pattern, text in FORBIDDEN.items() if re.fullmatch(pattern, hit))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_are_in_plain_english(path: Path) -> None:
    found = Counter(hits(prose(path.read_text(encoding="utf-8"))))
    assert not found, f"say it plainly, as FORBIDDEN suggests: {dict(found)}"


@pytest.mark.parametrize("folder", CODE)
def test_code_does_not_fall_back_into_the_dialect(folder: str) -> None:
    paths = {*(ROOT / folder).rglob("*.py")} - {Path(__file__).resolve()}
    sources = ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in sorted(paths))
    found = {
        (name, hit, instead(hit))
        for name, source in sources
        if PATTERN.search(re.sub(r"[\W_]+", " ", source))  # (quicker than to split it into tokens)
        for hit in hits(words(source))
    }
    assert not found, f"(file, word, what to write instead): {sorted(found)}"


def test_pages_quote_code_but_their_prose_is_read() -> None:
    page = "Fine.\n\n```\nwhoever\n```\n`nobody` [x](beside.md) is so\nmany, and Told."
    assert hits(prose(page)) == ["so many", "told"]


def test_names_docstrings_comments_and_messages_are_read() -> None:
    source = 'def whoever_waits(x):\n    """It goes\n    on."""\n    return x is None  # (mend it)\n\nz = f"told {x}"\n'
    assert hits(words(source)) == ["whoever", "goes on", "mend", "told"]
    assert not hits(words("besides = retold = recommended = 1"))
