"""Inference engines that use kvstore. One package per engine; what they share (copy engines) lies beside them.

An engine package makes no caching decision of its own: it translates between the engine's hooks and `kvstore.Client`.
"""
