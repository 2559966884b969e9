"""Shared state of tests: one thread, float32, one seed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("sbpc", deadline=None, derandomize=True)
settings.load_profile("sbpc")


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts from the same seed and the usual default dtype."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def own_targets() -> Iterator[None]:
    """Targets that a test loads are forgotten after it: a process of a user runs one command, and one of tests runs many."""
    yield
    for name in [name for name in sys.modules if name.startswith("target_")]:
        del sys.modules[name]


@pytest.fixture
def float64() -> None:
    """New tensors are float64 in this test."""
    torch.set_default_dtype(torch.float64)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded with `record_property("figure", text)`, in the order of their names."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    figures = sorted(
        (r.nodeid, text) for r in reports for key, text in getattr(r, "user_properties", ()) if key == "figure"
    )
    for _, text in figures:
        terminalreporter.write_line(text)
    errors = [float(value) for r in reports for key, value in getattr(r, "user_properties", ()) if key == "error"]
    if errors:
        terminalreporter.write_line(
            f"largest relative error of all plans: {max(errors):.2e}, in {len(errors)} groups of plans"
        )
    lacking = [int(value) for r in reports for key, value in getattr(r, "user_properties", ()) if key == "lacking"]
    if lacking:
        terminalreporter.write_line(
            f"{sum(lacking)} valid signatures that no rule offers, each with its reason in tests/lacking.txt"
        )
    for kind in ("signatures", "mutants", "pairs"):
        counts = [int(value) for r in reports for key, value in getattr(r, "user_properties", ()) if key == kind]
        if counts:
            terminalreporter.write_line(
                f"{sum(counts)} {kind} proved" if kind != "mutants" else f"{sum(counts)} mutants rejected"
            )
