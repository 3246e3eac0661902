"""Fixtures of the conformance tests."""

from __future__ import annotations

from tests.conformance.drive import tapes

__all__ = ["tapes"]
