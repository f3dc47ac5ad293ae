"""Evolving Infra node agent: one engine and its node."""
