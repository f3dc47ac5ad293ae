"""Make the bearer tokens docker-compose.yml mounts: one for clients, one between services.

    python deploy/compose/credentials.py [DIRECTORY]     default: build/compose

Existing files stay, so running it again changes nothing. Needs evolving-common.
"""

from __future__ import annotations

import sys
from pathlib import Path

from evolving.runtime.credentials import Scope, new_credential


def make(directory: Path) -> None:
    """Write credentials.toml, cluster.token and client.token, readable by their owner alone."""
    directory.mkdir(parents=True, exist_ok=True)
    credentials = directory / "credentials.toml"
    if credentials.exists():
        print(f"{credentials} is there already")
        return
    tables = []
    scopes: tuple[Scope, ...] = ("client", "cluster")
    for scope in scopes:
        token, table = new_credential("default", scope)
        tables.append(table)
        _write(directory / f"{scope}.token", token + "\n")
    _write(credentials, "\n".join(tables))
    print(f"wrote credentials.toml, cluster.token and client.token to {directory}")


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "build" / "compose")
