"""Shared state of tests: one thread, float32, one seed."""

from __future__ import annotations

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


@pytest.fixture
def float64() -> None:
    """New tensors are float64 in this test."""
    torch.set_default_dtype(torch.float64)
