"""``python -m kvstore`` is ``kvstore``."""

from __future__ import annotations

import sys

from kvstore.cli import main

sys.exit(main())
