"""What `make up`, `down`, `status` and `logs` do: `control.py up | down | status | logs`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from cluster import BIN, DEFAULT_MODEL, DEFAULT_STATE, ClusterError, ClusterSpec, LocalCluster

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="A cluster on this machine."
)


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 3,
    engine: Annotated[str, typer.Option(help="sglang or mock.")] = "sglang",
    model_path: Annotated[Path, typer.Option(help="Directory of the model.")] = DEFAULT_MODEL,
    gateway_port: Annotated[int, typer.Option(help="Port of the gateway.")] = 7000,
    state_dir: Annotated[Path, typer.Option(help="Where logs and state go.")] = DEFAULT_STATE,
) -> None:
    """Start it and wait until it serves."""
    spec = ClusterSpec(
        state_dir=state_dir, nodes=nodes, engine=engine, model_path=model_path, gateway_port=gateway_port
    )
    cluster = LocalCluster(spec, say=typer.echo)
    try:
        cluster.start()
    except ClusterError as error:
        typer.echo(f"cluster: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(next_steps(cluster))


def next_steps(cluster: LocalCluster) -> str:
    """What to try on a running cluster."""
    return f"""
The cluster is up. Try:
  export EVOLVING_ETCD={cluster.etcd_address}
  {BIN}/evolvectl status
  {BIN}/evolvectl generate "The capital of France is"
  {BIN}/evolvectl split set node-b=decode --reason "trying it"
  {BIN}/evolvectl plan release          what was set holds until then; after it measurements decide again
  {BIN}/evolvectl plan show             by what they did: a window takes ten minutes
or from Python ({BIN}/python -m asyncio):
  from evolving_client import Client
  async with Client("{cluster.gateway_address}") as client:
      branch = client.branch()
      async for event in branch.generate(messages=[{{"role": "user", "content": "hi"}}], max_tokens=32):
          print(event)
Logs are in {cluster.spec.state_dir / "logs"}; stop everything with: make down"""


@app.command()
def down(state_dir: Annotated[Path, typer.Option(help="As given to up.")] = DEFAULT_STATE) -> None:
    """Stop it; running requests get their grace period."""
    cluster = LocalCluster(ClusterSpec(state_dir=state_dir))
    if not cluster.load():
        typer.echo("nothing is running")
        return
    killed = cluster.stop()
    typer.echo("stopped" + (f"; had to kill {', '.join(killed)}" if killed else ""))


@app.command()
def status(state_dir: Annotated[Path, typer.Option(help="As given to up.")] = DEFAULT_STATE) -> None:
    """Show its processes, then the cluster as evolvectl sees it."""
    cluster = LocalCluster(ClusterSpec(state_dir=state_dir))
    if not cluster.load():
        typer.echo("nothing is running; start it with: make up")
        raise typer.Exit(3)
    for process in cluster.processes.values():
        state = "running" if process.alive() else "gone"
        typer.echo(f"{process.name:12} {state:8} pid {process.pid:<8} {process.address}")
    result = subprocess.run([str(BIN / "evolvectl"), "--etcd", cluster.etcd_address, "status"], check=False)
    raise typer.Exit(result.returncode)


@app.command()
def logs(state_dir: Annotated[Path, typer.Option(help="As given to up.")] = DEFAULT_STATE) -> None:
    """Follow the logs of all its processes."""
    files = sorted(str(path) for path in (state_dir / "logs").glob("*.log"))
    if not files:
        typer.echo("there are no logs; start it with: make up")
        raise typer.Exit(3)
    os.execvp("tail", ["tail", "-n", "20", "-F", *files])


if __name__ == "__main__":
    app()
