"""The cases of ``scripts/bench.py``: what the launching side measures, and (``jobs/``) what runs under horovodrun.

A case is a module with ``HELP``, ``add_arguments(parser)``, ``run(args, say) -> Report`` and ``draw(figure, rows)``.
``runs`` and ``panels`` are of ``scripts/plot.py``, which draws what runners have logged in the same looks.
"""
