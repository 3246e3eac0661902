"""What ``hvd_async record`` is on each rank: recorded.py [--without-horovod] FOLDER SCRIPT ARGUMENT..."""

from __future__ import annotations

import sys

if sys.argv[1] == "--without-horovod":  # as if it were not installed
    del sys.argv[1]
    sys.modules["horovod"] = None  # type: ignore[assignment]

from hvd_async.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["record", "--out", *sys.argv[1:]]))
