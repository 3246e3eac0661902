"""The benchmarks of ``scripts/bench.py``.

``cases``: what is measured. ``jobs``: the programs that their ranks run under horovodrun. ``support``: what cases
share, and what ``scripts/plot.py`` reads and draws of the runners' files. measurements.md has what was found.
"""
