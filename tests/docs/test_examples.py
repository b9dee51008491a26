"""The examples in the documents, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import Daemon

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/buffer.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ENDPOINT", served.endpoint)
    exec(compile(example, "docs/buffer.md", "exec"), {"__name__": "__main__"})
