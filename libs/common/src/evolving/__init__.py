"""Evolving Infra: what every service shares."""
