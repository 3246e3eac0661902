"""For the site's API pages: factories' docstrings with their options filled in, as at run time."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from typing import Any

import griffe

from hvd_async.algorithms.option import documented

DECORATOR = "hvd_async.algorithms.option.documented"


class OptionDocs(griffe.Extension):
    """Does to docstrings that are read from the source what ``documented`` does to those of functions."""

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Fill in the docstring of a function that has the decorator."""
        for decorator in func.decorators:
            call = decorator.value
            if not isinstance(call, griffe.ExprCall) or call.function.canonical_path != DECORATOR or not func.docstring:
                continue
            module, _, name = call.arguments[0].canonical_path.rpartition(".")  # type: ignore[union-attr]

            def factory() -> None: ...

            factory.__name__ = func.name
            factory.__doc__ = textwrap.indent(func.docstring.value, " " * 4) + "\n"
            documented(getattr(importlib.import_module(module), name))(factory)
            func.docstring.value = inspect.cleandoc(factory.__doc__)
