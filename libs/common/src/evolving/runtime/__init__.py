"""The async shell every service shares."""
