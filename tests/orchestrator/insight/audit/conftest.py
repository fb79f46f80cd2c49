"""Tests of the audit compute with a small vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_model import small_model


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of a model that loads fast."""
    return small_model()
