"""Generated public API stubs."""
