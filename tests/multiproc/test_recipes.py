"""The recipes of docs/examples/recipes, as they are, at 2 ranks: trainers and launchers of others."""

from __future__ import annotations

import importlib
import re
import tempfile
from pathlib import Path

import pytest
from launch import REPOSITORY, Job, RunJob, run_alone

from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc

FOLDER = REPOSITORY / "docs" / "examples" / "recipes"
PAGE = REPOSITORY / "docs" / "recipes.md"
BESIDES = {
    "lightning": "the checkpoint has 220 steps and the model's weights: True",
    "keras_fit": r"the saved model predicts alike: True; best.keras has the least val_loss: (\S+)\n.*val_loss \1 of",
    "timm_imagenet": "which differ by 0.0 between ranks",
    "ray_executor": r"ranks \[0, 1\]",
    "ray_train": r"ranks \[0, 1\]",
}
"""What a recipe says before its last line."""
RECIPES = sorted(FOLDER.glob("*.py"))
LAUNCHERS = {"ray_executor", "ray_train"}
"""Recipes that start their ranks themselves."""
SLOW = LAUNCHERS | {"timm_imagenet", "trainer", "keras_fit"}
"""Recipes whose frameworks take long to start: tried in a long run."""
UNDER_TORCHRUN = ("accelerate_loop", "lightning", "trainer") if LONG_RUN else ("lightning",)
"""Recipes whose trainers look at what torchrun sets."""
TRIED = [path for path in RECIPES if LONG_RUN or path.stem not in SLOW.union(UNDER_TORCHRUN)]


def run(path: Path, folder: Path, forked: RunJob) -> Job:
    """The recipe's job: Ray starts its ranks itself, and writes into a folder of its own."""
    if path.stem == "ray_train":
        try:
            importlib.import_module("ray.train")
        except ImportError as error:
            pytest.skip(f"Ray Train is not installed: {error}")
    if path.stem in LAUNCHERS:
        with tempfile.TemporaryDirectory(prefix="ray") as short:  # (a socket's path has 107 bytes at most)
            return run_alone(str(path), env={"HOME": str(folder), "RAY_TMPDIR": short})
    framework = "tensorflow" if path.stem.startswith("keras") else "torch"
    return forked(framework, str(path), 2, env={"TMPDIR": str(folder)})


@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem)
def test_a_recipe_trains_and_its_replicas_agree(
    forked: RunJob, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(path, run(path, tmp_path_factory.mktemp("r"), forked))


@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_a_recipe_trains_under_torchrun_too(launched: RunJob, name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.py"
    check(path, launched("torch", str(path), 2, transport="torch", env={"TMPDIR": str(tmp_path)}))


def check(path: Path, job: Job) -> None:
    """Check that all ranks have trained one model well, and no rank one of its own."""
    job.check()
    found = re.search(r"test accuracy ([01]\.\d+).*replicas differ by (\S+)", job.output)
    assert found, str(job)
    assert float(found[1]) > 0.8
    assert float(found[2]) == 0.0
    assert job.output.count("replicas differ by") == 1, str(job)
    assert re.search(BESIDES.get(path.stem, ""), job.output), str(job)


def test_the_page_has_each_recipe_and_a_line_it_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in RECIPES:
        assert f"(examples/recipes/{path.name})" in text, path.name
    assert text.count("replicas differ by 0.0") == len(RECIPES)
