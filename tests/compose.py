"""The processes that docker-compose.yml names, run on this machine without containers.

Commands, ports and health checks are taken from the file; only what containers give is replaced: host names become
127.0.0.1, mounted directories become the directories that are mounted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from cluster import BIN, ROOT, ClusterSpec, LocalCluster


class ComposeCluster(LocalCluster):
    """docker-compose.yml as processes. `mounts` replaces container paths by paths of this machine."""

    def __init__(self, spec: ClusterSpec, mounts: dict[str, Path]) -> None:
        super().__init__(spec)
        self._mounts = mounts
        self.services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

    def start(self) -> None:
        """Start every service and wait until it serves. Stops what it started when one does not."""
        (self.spec.state_dir / "logs").mkdir(parents=True)
        try:
            self.start_etcd()
            for name in self.services:
                if name != "etcd":
                    self._spawn(
                        name, self.command(name), self._flag(name, "listen"), self._flag(name, "metrics-listen")
                    )
            self.wait_ready([name for name in self.services if name != "etcd"])
        except BaseException:
            self.stop()
            raise

    def command(self, name: str) -> list[str]:
        """What a service's container would run."""
        program, *arguments = self.services[name]["command"]
        return [str(BIN / program), *(self._here(argument) for argument in arguments), *self.spec.service_flags]

    def check_health(self, name: str) -> int:
        """Exit status of a service's own health check."""
        kind, program, *arguments = self.services[name]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python")
        return subprocess.run([sys.executable, *arguments], check=False, timeout=30).returncode

    def _flag(self, name: str, flag: str) -> str:
        found = [a.partition("=")[2] for a in self.services[name]["command"] if a.startswith(f"--{flag}=")]
        return self._here(found[0])

    def _here(self, argument: str) -> str:
        argument = argument.replace("0.0.0.0:", "127.0.0.1:").replace("etcd:2379", self.etcd_address)
        for name in self.services:
            argument = argument.replace(f"={name}:", "=127.0.0.1:")
        for there, here in self._mounts.items():
            argument = argument.replace(there, str(here))
        return argument
