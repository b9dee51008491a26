"""The wire: generated stubs, and the only places where messages and statuses become values and errors."""
