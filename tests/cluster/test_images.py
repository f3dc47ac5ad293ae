"""The four images: what their Dockerfiles take exists and is let through; where a container engine answers, they are
built and run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cluster import ROOT
from typer.main import get_command

from evolving_client.ctl.app import app

IMAGES = ("gateway", "directory", "planner", "node-agent")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def dockerfile(image: str) -> Path:
    return ROOT / "services" / image.replace("-", "_") / "Dockerfile"


def instructions(image: str, name: str) -> list[str]:
    """The arguments of each instruction of that name."""
    return re.findall(rf"^{name} (.+)$", dockerfile(image).read_text(), flags=re.MULTILINE)


def engine_answers() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_there_and_sent_to_the_builder(image: str) -> None:
    let_through = [Path(line[1:]) for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [Path(line.split()[0]) for line in instructions(image, "COPY") if not line.startswith("--from")]
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert any(path == given or given in path.parents for given in let_through), f"{path} is ignored"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_in_particular_and_checks_its_own_port(image: str) -> None:
    assert instructions(image, "USER") == ["evolving"]
    grpc_port, _ = instructions(image, "EXPOSE")[0].split()
    (check,) = instructions(image, "HEALTHCHECK")
    assert f"127.0.0.1:{grpc_port}" in check


def test_compose_uses_the_images_that_make_images_builds() -> None:
    plan = subprocess.run(["make", "-n", "images"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    built = set(re.findall(r"-t (\S+)", plan))
    assert built == {f"evolving-{image}:dev" for image in IMAGES}
    assert {service["image"] for name, service in COMPOSE.items() if name != "etcd"} == built


def test_an_operator_finds_evolvectl_ready_in_the_planners_container() -> None:
    """It is installed, and told of what the planner itself is told of."""
    assert "libs/client libs/client" in instructions("planner", "COPY")
    assert "./libs/client" in dockerfile("planner").read_text().split()
    planner = COMPOSE["planner"]
    told = {"EVOLVING_ETCD": "--etcd-endpoints", "EVOLVING_TOKEN_FILE": "--token-file"}
    assert {f"{flag}={planner['environment'][name]}" for name, flag in told.items()} <= set(planner["command"])
    options = {variable for param in get_command(app).params for variable in [getattr(param, "envvar", None)]}
    assert set(planner["environment"]) <= options


@pytest.mark.skipif(not engine_answers(), reason="no container engine answers here (docker info)")
@pytest.mark.timeout(3600)
def test_images_are_built_and_answer() -> None:
    subprocess.run(["make", "images"], cwd=ROOT, check=True)
    for image in IMAGES:
        run = ["docker", "run", "--rm", f"evolving-{image}:dev"]
        shown = subprocess.run([*run, f"evolving-{image}", "--version"], check=True, capture_output=True, text=True)
        assert shown.stdout.startswith(f"evolving-{image} ")
        assert subprocess.run([*run, "id", "-u"], check=True, capture_output=True, text=True).stdout != "0\n"
    subprocess.run(["docker", "run", "--rm", "evolving-planner:dev", "evolvectl", "--help"], check=True)
