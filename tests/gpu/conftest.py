"""Tests on a real GPU (`python -m pytest tests/gpu`); skipped, with the reason, where there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def why_not() -> str:
    """What is missing; empty if nothing is."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    import torch

    return "" if torch.cuda.is_available() else "there is no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not() if any(HERE in item.path.parents for item in items) else ""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
