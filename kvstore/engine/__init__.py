"""The direct face for engines that have no plugin: KVTransfer.

An engine names its prompt by token ids; the KV of its layers goes into blocks and comes back layer by layer.
"""

from __future__ import annotations

from kvstore.engine.layout import KVTensor
from kvstore.engine.load import Load
from kvstore.engine.transfer import KVTransfer

__all__ = ["KVTensor", "KVTransfer", "Load"]
