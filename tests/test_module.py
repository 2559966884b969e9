"""Real processes: a user's training script on the parallel module does what it does on the module itself."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.module_checks import CHECKS
from tests.module_worlds import Alone, Ranks
from tests.processes import run_ranks


def on_ranks(names: list[str], folder: Path) -> dict[str, Any]:
    """What each check returns on this rank, or how it fails."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    world = Ranks(folder)
    for name in names:
        try:
            found[name] = CHECKS[name](world)
        except Exception:  # the test of that name fails with it
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(on_ranks, 4, list(CHECKS), tmp_path_factory.mktemp("plans"), seconds=300)


def test_a_script_does_on_four_ranks_what_it_does_in_one_process(ranks: list[Any]) -> None:
    for name in CHECKS:
        torch.set_default_dtype(torch.float64)
        expected = CHECKS[name](Alone())
        for rank, found in enumerate(ranks):
            equal(found[name], expected, f"rank {rank}: {name}")


def equal(found: Any, expected: Any, path: str) -> None:
    """Nested values are equal; floating-point ones to 1e-10."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{path}: {found}"
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda m: f"{path}: {m}")
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and list(found) == list(expected), f"{path}: {found}"
        for key, value in expected.items():
            equal(found[key], value, f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected), f"{path}: {found}"
        for at, value in enumerate(expected):
            equal(found[at], value, f"{path}[{at}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-10), path
    else:
        assert found == expected, path
