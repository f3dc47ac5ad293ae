"""The asyncio client of Evolving Infra."""
