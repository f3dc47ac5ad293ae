"""Make the bearer tokens of docker-compose.yml: one for clients, one between services.

    .venv/bin/python deploy/compose/credentials.py [DIRECTORY]     default: build/compose

DIRECTORY is its owner's alone. Below it, services/ is what containers mount; their user is not the owner and must be
able to read it. Existing files stay, so running it again changes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from evolving.runtime.credentials import new_credential


def make(directory: Path) -> None:
    """Write client.token, services/cluster.token and services/credentials.toml."""
    shared = directory / "services"
    if (shared / "credentials.toml").exists():
        print(f"{shared / 'credentials.toml'} is there already")
        return
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # nobody else on this machine gets as far as what is readable below
    shared.mkdir(exist_ok=True)
    shared.chmod(0o755)
    client_token, client_table = new_credential("default", "client")
    cluster_token, cluster_table = new_credential("default", "cluster")
    _write(directory / "client.token", client_token + "\n", 0o600)
    _write(shared / "cluster.token", cluster_token + "\n", 0o644)
    _write(shared / "credentials.toml", f"{client_table}\n{cluster_table}", 0o644)
    print(f"wrote client.token, services/cluster.token and services/credentials.toml to {directory}")


def _write(path: Path, text: str, mode: int) -> None:
    path.touch()
    path.chmod(mode)  # before there is anything to read, and whatever the umask
    path.write_text(text)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "build" / "compose")
