"""Resting places below the pool, one module each; the contract is kvstore.tier."""
