"""Runs the benches one after the other: `python -m bench`, or `python -m bench --smoke` to see that they work."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from bench.harness import ROOT

BENCHES: Final = ("same_host", "acquire", "directory", "startup", "disk", "redis", "remote", "buffer")


def main(arguments: list[str]) -> int:
    """Each in a process of its own, so that none measures what another left behind."""
    return max(
        subprocess.run([sys.executable, "-m", f"bench.{name}", *arguments], cwd=ROOT, check=False).returncode
        for name in BENCHES
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
