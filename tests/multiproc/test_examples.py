"""The examples of docs/examples, as they are, at 2 ranks."""

from __future__ import annotations

import re

import pytest
from launch import REPOSITORY, RunJob

from tests.conftest import LONG_RUN

pytestmark = pytest.mark.multiproc

EXAMPLES = sorted((REPOSITORY / "docs" / "examples").glob("*.py"))
TRIED = [path for path in EXAMPLES if LONG_RUN or path.stem in ("torch_gossip", "torch_leader", "keras_eager")]
"""Each optimizer once in an ordinary run."""


def test_every_optimizer_has_an_example_in_both_frameworks() -> None:
    kinds = {f"{framework}_{kind}" for framework in ("torch", "keras") for kind in ("eager", "gossip", "leader")}
    assert {path.stem for path in EXAMPLES} == kinds


@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem)
def test_an_example_trains_and_its_replicas_agree(forked: RunJob, path) -> None:
    framework = "torch" if path.stem.startswith("torch") else "tensorflow"
    output = forked(framework, str(path), 2).check().output
    found = re.search(r"test accuracy (0\.\d+).*replicas differ by (\S+)", output)
    assert found, output
    assert float(found[1]) > 0.8
    assert float(found[2]) == 0.0
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
