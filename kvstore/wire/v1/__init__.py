"""Generated from proto/kvstore/v1 by `make stubs`; do not edit."""
