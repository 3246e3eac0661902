"""Results kept in a file, a line of JSON each: a run that was ended goes on with what is left."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .blocks import Block


class Kept:
    """Results of blocks, by what was asked.

    Args:
        path: the file, which need not be there; None: they are kept in memory only.
        how: what the blocks were run with beside what they say themselves, as JSON.
    """

    def __init__(self, path: Path | None, how: Any = None) -> None:
        self._path, self._how, self._found = path, how, dict[str, Block]()
        if path is not None and path.exists():
            whole = path.read_text().rpartition("\n")[0]
            path.write_text(f"{whole}\n" if whole else "")  # the last line was cut off if a run was killed
            self._found = dict(map(json.loads, whole.splitlines()))

    def of(self, asked: Block) -> Block | None:
        """Return the result of a block; None if it is not there."""
        return self._found.get(self._key(asked))

    def add(self, asked: Block, found: Block) -> None:
        """Keep a result."""
        self._found[self._key(asked)] = found
        if self._path is not None:
            with self._path.open("a") as lines:
                lines.write(json.dumps([self._key(asked), found]) + "\n")

    def _key(self, asked: Block) -> str:
        """All of a block, its times included, in short."""
        return hashlib.sha256(json.dumps([self._how, asked], sort_keys=True).encode()).hexdigest()
