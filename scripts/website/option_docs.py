"""For the site's API pages: factories' parameters and docstrings with their options, as at run time.

The pages are made from the source, without a framework. So the arguments of a binding are not imported: the options of
the family are, and the rest is read from the source.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import griffe

from hvd_async.algorithms.option import option, options_of, with_options

DECORATOR = "hvd_async.algorithms.option.takes"
FAMILIES = "hvd_async.algorithms."


class OptionDocs(griffe.Extension):
    """Does to functions that are read from the source what ``takes`` does to those that are imported."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Complete all functions that have the decorator."""
        griffe.DataclassesExtension().on_package(pkg=pkg, loader=loader)
        for function in _functions(pkg):
            for decorator in function.decorators:
                call = decorator.value
                if isinstance(call, griffe.ExprCall) and call.function.canonical_path == DECORATOR:
                    path = call.arguments[0].canonical_path  # type: ignore[union-attr]
                    _complete(function, loader.modules_collection[path])


def _functions(module: griffe.Module) -> Iterator[griffe.Function]:
    """Yield the functions of a module and of its submodules."""
    for member in module.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, griffe.Module):
            yield from _functions(member)


def _complete(function: griffe.Function, arguments: griffe.Class) -> None:
    """Give a function the parameters of its arguments class, and their descriptions."""
    parameters = {one.name: one for one in arguments.parameters if one.name != "self"}
    path = next(each.path for each in arguments.mro() if each.path.startswith(FAMILIES))
    module, _, name = path.rpartition(".")
    family = getattr(importlib.import_module(module), name)
    own = [
        (name, Any, eval(str(one.default), {"option": option}))
        for name, one in parameters.items()
        if name not in options_of(family) and str(one.default).startswith("option(")
    ]
    made = dataclasses.make_dataclass(arguments.name, own, bases=(family,), frozen=True, kw_only=True)
    options, defaults = options_of(made), {field.name: repr(field.default) for field in dataclasses.fields(made)}
    function.parameters = griffe.Parameters(
        *(one for name, one in parameters.items() if name not in options),
        *(
            griffe.Parameter(
                name,
                annotation=parameters[name].annotation,
                kind=griffe.ParameterKind.keyword_only,
                default=defaults[name],
            )
            for name in options
        ),
    )
    if function.docstring is not None:
        function.docstring.value = with_options(function.docstring.value, made)
