"""Recorded agent sessions (`traces`, `trace_files`) and what one pool of KV could do for them (`oracle`)."""
