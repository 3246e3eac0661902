"""``python -m hvd_async``: see ``hvd_async.cli``."""

from __future__ import annotations

import sys

from hvd_async.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
