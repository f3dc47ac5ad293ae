"""Evolving Infra directory: where KV is and which branches need it."""
