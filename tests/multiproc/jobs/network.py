"""Measures the network over TensorFlow's collectives, as ``hvd_async doctor`` does over torch's where it is there."""

from __future__ import annotations

import msgspec
from common import Report

from hvd_async.doctor.network import Ranks, measure


def main() -> None:
    with Ranks("tensorflow") as ranks:
        Report(ranks.rank).put("network", measured=msgspec.to_builtins(measure(ranks)))


if __name__ == "__main__":
    main()
