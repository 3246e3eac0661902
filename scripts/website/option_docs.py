"""For the site's API pages: factories' parameters and docstrings with their options, as at run time.

The pages are made from the source, without a framework. So the arguments of a binding are not imported: the options of
the family are, and the rest is read from the source.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import griffe

from hvd_async.algorithms.option import option, options_of, with_options
from hvd_async.algorithms.registry import OPTIONS

KEYWORD = griffe.ParameterKind.keyword_only


class OptionDocs(griffe.Extension):
    """Does to functions that are read from the source what ``takes`` does at run time."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete the factories of both bindings."""
        griffe.DataclassesExtension().on_package(pkg=pkg, **kwargs)
        for binding in ("torch", "tensorflow"):
            for family, options in OPTIONS.items():
                factories, name = pkg[f"{binding}.factories"], family.capitalize()
                _complete(factories[f"{name}Optimizer"], factories[f"{name}Arguments"], options)


def _complete(function: griffe.Function, arguments: griffe.Class, family: type) -> None:
    """Give a function the parameters of its arguments class, and the descriptions of the options among them."""
    others = [one for one in arguments.parameters if one.name != "self" and not hasattr(family, one.name)]
    own = {one.name: one for one in others if str(one.default).startswith("option(")}
    fields = [(name, str(one.annotation), eval(str(one.default), {"option": option})) for name, one in own.items()]
    made: Any = dataclasses.make_dataclass(arguments.name, fields, bases=(family,), frozen=True, kw_only=True)
    types = {field.name: field.type for field in dataclasses.fields(made)}
    function.parameters = griffe.Parameters(
        *(one for one in others if one.name not in own),
        *(
            griffe.Parameter(name, annotation=types[name], kind=KEYWORD, default=repr(getattr(made, name)))
            for name in options_of(made)
        ),
    )
    function.docstring.value = with_options(function.docstring.value, made)
