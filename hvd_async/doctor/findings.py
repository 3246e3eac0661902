"""Findings of the checks, each with a verdict, a fact and advice."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

FORMAT = 1
"""Version of the JSON format; increased when a field changes its meaning."""


class Verdict(enum.Enum):
    """Result of a check."""

    OK = "ok"
    NOTE = "note"
    """Works, but more slowly than possible, or not for every use."""
    PROBLEM = "problem"
    """Jobs will fail."""


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    Attributes:
        name: of the check.
        verdict: its result.
        fact: human-readable, with its unit.
        advice: recommended action; empty if none is needed.
        values: the same fact, machine-readable; names end in their unit (``_bytes``, ``_s``).
    """

    name: str
    verdict: Verdict
    fact: str
    advice: str = ""
    values: Mapping[str, Any] = {}


OK, NOTE, PROBLEM = Verdict


def judged(name: str, fact: str, /, *cases: tuple[Any, ...], **values: Any) -> Finding:
    """Return the finding of the first case that holds, OK with this fact if none does.

    Args:
        name: of the check.
        fact: unless the case has its own.
        cases: (condition, verdict, advice), and maybe another fact.
        values: the fact, machine-readable.
    """
    for holds, verdict, advice, *other in cases:
        if holds:
            return Finding(name, verdict, str(*other) or fact, advice, values)
    return Finding(name, OK, fact, "", values)


def ok(name: str, fact: str, /, **values: Any) -> Finding:
    """Return a finding that needs no action."""
    return judged(name, fact, **values)


def note(name: str, fact: str, advice: str, /, **values: Any) -> Finding:
    """Return a finding that the user should know about."""
    return judged(name, fact, (True, NOTE, advice), **values)


def problem(name: str, fact: str, advice: str, /, **values: Any) -> Finding:
    """Return a finding that makes jobs fail."""
    return judged(name, fact, (True, PROBLEM, advice), **values)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of some findings; OK if there are none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def findings_as_json(findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """Return findings as ``--json`` writes them: ``format``, ``verdict``, ``findings``, and ``more``."""
    return {"format": FORMAT, "verdict": worst(findings).value, "findings": msgspec.to_builtins(findings), **more}
