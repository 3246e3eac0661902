"""The site's API pages: what is public, read from the source, so that no framework is needed and no name missing."""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOROVODS = (
    "Everything else of `{0}` is in this module too, under its own name: see [Horovod's documentation]"
    "(https://horovod.readthedocs.io/en/stable/api.html).\n"
)
METHODS = {
    "Both frameworks": {
        "Every optimizer": "optimizers.methods.OptimizerMethods",
        "EagerOptimizer": "optimizers.methods.EagerMethods",
        "GossipOptimizer": "optimizers.methods.GossipMethods",
        "LeaderOptimizer": "optimizers.methods.LeaderMethods",
    },
    "Torch": {
        "Every optimizer in torch": "torch.methods.OptimizerMethods",
        "EagerOptimizer in torch": "torch.eager_methods.EagerMethods",
        "GossipOptimizer, LeaderOptimizer in torch": "torch.methods.WeightMethods",
    },
    "Keras": {
        "EagerOptimizer in Keras": "tensorflow.eager_methods.EagerMethods",
        "GossipOptimizer, LeaderOptimizer in Keras": "tensorflow.methods.WeightMethods",
    },
}
"""The classes below ``hvd_async`` whose methods wrapped optimizers have, by what they are of."""
PARTS = ("callbacks", "elastic")
"""Public modules of the bindings."""


def tree(module: str) -> ast.Module:
    """Return the source of a module."""
    base = ROOT.joinpath(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def public(module: str) -> list[str]:
    """Return a module's public names, in the source's order.

    They are those of ``__all__`` where it is written out, else those of ``_ours`` and what the module defines.
    """
    listed: dict[str, list[str]] = {}
    defined: list[str] = []
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            defined.append(name)
            if isinstance(node.value, ast.List | ast.Tuple):
                listed[name] = [ast.unparse(leaf).strip("'") for leaf in node.value.elts]
    ours = [*listed.get("_ours", []), *(name for name in defined if name.isidentifier() and name[0] != "_")]
    places = {name: place for place, name in enumerate(defined)}
    exported = sorted(listed.get("__all__", []), key=lambda name: places.get(name, -1))
    return exported or list(dict.fromkeys(ours))


def imported_from(module: str, name: str) -> str | None:
    """Return the module that defines what a module has under a name, as far as that is ours; None: itself."""
    for node in tree(module).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            source = node.module or ""
            return imported_from(source, name) or source if source.startswith("hvd_async") else source
    return None


def entries(module: str) -> str:
    """Return the lines that have a module's public names documented; Horovod's own are named."""
    text = ""
    for name in public(module):
        if name in PARTS:
            continue
        source = imported_from(module, name)
        if source is not None and source.startswith("horovod"):
            text += f"### `{name}` {{ #{module}.{name} }}\n\n`{source}.{name}`, as it is.\n\n"
        else:
            text += f"::: {module}.{name}\n\n"
    return text


def methods() -> str:
    """Return the page on the methods that wrapped optimizers have."""
    text = (
        "# Methods of wrapped optimizers\n\nA wrapper returns an instance of the wrapped optimizer's own class, which "
    )
    text += "has these methods besides: those of all, and those of its framework.\n\n"
    for title, classes in METHODS.items():
        text += f"## {title}\n\n"
        for heading, name in classes.items():
            text += f"::: hvd_async.{name}\n    options: {{heading: '{heading}', toc_label: '{heading}'}}\n\n"
    return text


def module_page(module: str) -> str:
    """Return the page of a public module; of a binding with Horovod's names and its own parts."""
    text = f"::: {module}\n    options: {{members: false, heading: {module}, heading_level: 1}}\n\n"
    if not module.startswith(("hvd_async.torch", "hvd_async.tensorflow")):
        return text + entries(module)
    text += HOROVODS.format(f"horovod.{module.partition('.')[2]}")
    text += "What the wrappers return has [these methods](methods.md).\n\n## Wrappers and functions\n\n"
    text += entries(module)
    for part in PARTS:
        if part in public(module):
            text += f"::: {module}.{part}\n    options: {{members: false, heading: hvd.{part}, heading_level: 2}}\n\n"
            text += entries(f"{module}.{part}")
    return text


MODULES = {
    "hvd_async": ("hvd_async.md", "the wrappers for either framework; imports none until one is called"),
    "hvd_async.torch": ("torch.md", "instead of `horovod.torch`"),
    "hvd_async.tensorflow": ("tensorflow.md", "instead of `horovod.tensorflow`, for training loops"),
    "hvd_async.tensorflow.keras": ("keras.md", "instead of `horovod.tensorflow.keras`, for `fit()`"),
    "methods": ("methods.md", "what wrapped optimizers can do: `drain()`, `stats()`, `consensus()` and more"),
    "hvd_async.monitor": ("monitor.md", "a job while it runs: TensorBoard, Prometheus, warnings"),
    "hvd_async.errors": ("errors.md", "exceptions in addition to `ValueError`"),
    "hvd_async.stats": ("stats.md", "what `opt.stats()` returns"),
    "hvd_async.topology": ("topology.md", "graphs for `GossipOptimizer(topology=...)`"),
}
"""Page of each public module, and of the methods, with a line about it."""


def pages() -> dict[str, str]:
    """Return all API pages, by the name of their source on the site; the first one has a line for each other."""
    text = "# API\n\nMade of the docstrings; `help()` of each shows the same.\n\n| module | |\n|---|---|\n"
    text += "".join(f"| [`{name}`]({page}) | {line} |\n" for name, (page, line) in MODULES.items())
    found = {"api/index.md": text + "\nHow they behave, whatever the framework: [promises](../promises.md).\n"}
    for name, (page, _) in MODULES.items():
        found[f"api/{page}"] = methods() if name == "methods" else module_page(name)
    return found
