"""A daemon for the tests of buffers and pipes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

_NUMBERS = itertools.count()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"n{next(_NUMBERS)}"


Opener = Callable[..., object]
