"""Generated internal stubs."""
