"""What ``hvd_async record`` is on each rank, of ``recorded_training.py``: recorded.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from hvd_async.cli.main import main

if __name__ == "__main__":
    script = Path(__file__).with_name("recorded_training.py")
    sys.exit(main(["record", "--out", f"{sys.argv[1]}/horovod", str(script), sys.argv[1], "--steps", "30"]))
