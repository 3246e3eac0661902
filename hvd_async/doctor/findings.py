"""Findings of the checks: a verdict, the fact, and what to do about it. How they are shown is elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
"""The JSON's version; raised when a field changes its meaning."""


class Verdict(enum.Enum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    """Works, but slower than it could, or not for everything."""
    PROBLEM = "problem"
    """Jobs will fail."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the check.
        verdict: how it ended.
        fact: in words, with its unit.
        advice: what to do about it; empty if there is nothing to do.
        values: the same fact for programs; names end in their unit (``_bytes``, ``_s``).
    """

    name: str
    verdict: Verdict
    fact: str
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def ok(name: str, fact: str, /, **values: Any) -> Finding:
    """Return a finding that needs no action."""
    return Finding(name, Verdict.OK, fact, "", values)


def note(name: str, fact: str, advice: str, /, **values: Any) -> Finding:
    """Return a finding that the user should know of."""
    return Finding(name, Verdict.NOTE, fact, advice, values)


def problem(name: str, fact: str, advice: str, /, **values: Any) -> Finding:
    """Return a finding that makes jobs fail."""
    return Finding(name, Verdict.PROBLEM, fact, advice, values)


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of some findings; OK if there are none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def as_json(findings: Iterable[Finding], **more: Any) -> dict[str, Any]:
    """Return findings as ``--json`` writes them: ``format``, ``verdict``, ``findings``, and ``more``."""
    found = list(findings)
    listed = [
        {
            "name": finding.name,
            "verdict": finding.verdict.value,
            "fact": finding.fact,
            "advice": finding.advice,
            "values": dict(finding.values),
        }
        for finding in found
    ]
    return {"format": FORMAT, "verdict": worst(found).value, "findings": listed, **more}
