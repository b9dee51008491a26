"""Benches: each one a script beside what it measures itself against, in the same run. See bench/README.md."""
