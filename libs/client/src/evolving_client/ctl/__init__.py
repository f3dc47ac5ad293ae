"""evolvectl: the operator's command line."""

from evolving_client.ctl.app import main

__all__ = ["main"]
