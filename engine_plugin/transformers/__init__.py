"""Prefix KV of HuggingFace transformers models in the daemon's pool.

prefixes = PrefixCache(model, endpoint="unix:/run/kvstore.sock")
output = prefixes.generate(input_ids, max_new_tokens=20)    # loads what is there, stores what is new
"""

from __future__ import annotations

from engine_plugin.transformers.cache import LoadingLayer
from engine_plugin.transformers.prefix import PrefixCache

__all__ = ["LoadingLayer", "PrefixCache"]
