"""A cluster in virtual time over the core (`driver`); recorded sessions, what a pool could do for them (`oracle`)."""
