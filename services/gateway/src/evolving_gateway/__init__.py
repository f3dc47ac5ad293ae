"""Evolving Infra gateway: the client API, routing and hand-off."""
