"""Filter for ``horovodrun``'s output: drops rank 0's line prefixes and start-up chatter, keeps progress bars moving."""

from __future__ import annotations

import os
import re
import sys

PREFIX = re.compile(rb"\[(?:1,)?0\]<std(?:out|err)>:")
ANY_PREFIX = re.compile(rb"\[(?:1,)?\d+\]<std(?:out|err)>:")
CHATTER = re.compile(rb"WARNING: All log messages before absl|^[IW]\d{4} \d\d:\d\d:|To enable the following instr")
ENDS = re.compile(rb"[^\r\n]*[\r\n]+")


def clean(line: bytes) -> bytes:
    """A line (ended by \\n or \\r) as people want it; nothing if it says nothing."""
    return b"" if CHATTER.search(ANY_PREFIX.sub(b"", line)) else PREFIX.sub(b"", line)


def main() -> None:
    """Copy stdin to stdout, line by line and bar by bar."""
    pending = b""
    while chunk := os.read(0, 65536):
        pending += chunk
        done = 0
        for match in ENDS.finditer(pending):
            sys.stdout.buffer.write(clean(match.group()))
            done = match.end()
        pending = pending[done:]
        sys.stdout.flush()
    sys.stdout.buffer.write(clean(pending))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
