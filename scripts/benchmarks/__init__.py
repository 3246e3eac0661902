"""The cases of ``scripts/bench.py``: what the launching side measures, and (``jobs/``) what runs under horovodrun.

A case is a module with ``HELP``, ``add_arguments(parser)`` and ``run(args, say) -> Report``.
"""
