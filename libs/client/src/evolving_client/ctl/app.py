"""The commands of evolvectl and their options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from evolving.v1 import planner_pb2
from evolving_client.ctl import directory, models, output, split, status
from evolving_client.ctl.cluster import Cluster, Options
from evolving_client.ctl.command import fail, options_of, run
from evolving_client.ctl.failure import refused, unreachable, usage
from evolving_client.ctl.plain import plain
from evolving_client.ctl.plan_app import plan_app
from evolving_client.events import Finished

_HELP = """Look at an Evolving Infra cluster, and steer it.

Services and nodes are found through etcd: each registers itself below {prefix}/{partition}/services/ and nodes/, and
the leading planner and the newest directory are asked first. --gateway, --planner and --directory give an address
instead; then etcd is not needed, but for `status`. Global options may stand before or after the command.

Tables are for people. --json prints one JSON document whose fields stay as documented in libs/client/README.md.

Exit codes: 0 done; 1 refused by a service, or an audit found a mismatch; 2 wrong usage; 3 something that has to answer
can't be reached.
"""


def global_first(arguments: Sequence[str], with_value: frozenset[str], flags: frozenset[str]) -> list[str]:
    """The arguments with these options moved to the front, up to "--"."""
    front: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            rest.extend([argument, *remaining])
        elif argument in flags or argument.partition("=")[0] in with_value:
            front.append(argument)
            if argument in with_value:
                front.extend([value for value in [next(remaining, None)] if value is not None])
        else:
            rest.append(argument)
    return [*front, *rest]


class _GlobalOptionsAnywhere(TyperGroup):
    """Lets the group's own options also follow the command: `evolvectl status --json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = frozenset(opt for param in self.params if getattr(param, "is_flag", False) for opt in param.opts)
        with_value = frozenset(opt for param in self.params for opt in param.opts) - flags
        return super().parse_args(ctx, global_first(args, with_value, flags))


app = typer.Typer(
    help=_HELP,
    cls=_GlobalOptionsAnywhere,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
split_app = typer.Typer(help="The roles of the nodes.", no_args_is_help=True, rich_markup_mode=None)
branch_app = typer.Typer(help="Branches, as the directory knows them.", no_args_is_help=True, rich_markup_mode=None)
block_app = typer.Typer(help="Blocks of KV, as the directory knows them.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(split_app, name="split")
app.add_typer(plan_app, name="plan")
app.add_typer(branch_app, name="branch")
app.add_typer(block_app, name="block")


@app.callback()
def _global(
    context: typer.Context,
    gateway: Annotated[
        str, typer.Option(envvar="EVOLVING_GATEWAY", help="host:port of a gateway, or several, comma-separated")
    ] = "",
    planner: Annotated[str, typer.Option(envvar="EVOLVING_PLANNER", help="host:port of a planner")] = "",
    directory: Annotated[str, typer.Option(envvar="EVOLVING_DIRECTORY", help="host:port of a directory")] = "",
    etcd: Annotated[
        str, typer.Option(envvar="EVOLVING_ETCD", help="etcd members, host:port, comma-separated")
    ] = "127.0.0.1:2379",
    prefix: Annotated[str, typer.Option(envvar="EVOLVING_PREFIX", help="where the cluster's keys start")] = "/evolving",
    partition: Annotated[str, typer.Option(envvar="EVOLVING_PARTITION", help="partition of the cluster")] = "p0",
    token: Annotated[
        str, typer.Option(envvar="EVOLVING_TOKEN", help="bearer token, where the cluster has credentials")
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(envvar="EVOLVING_TOKEN_FILE", help="file holding the token; --token wins over it")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", envvar="EVOLVING_TIMEOUT_S", min=0.01, help="longest wait, seconds")
    ] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    context.obj = Options(
        gateway=gateway,
        planner=planner,
        directory=directory,
        etcd=etcd,
        prefix=prefix,
        partition=partition,
        token=token or _token_in(token_file),
        timeout_s=timeout_s,
        json=json,
    )


def _token_in(path: Path | None) -> str | None:
    """The token a file holds, if one is given."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(usage(f"--token-file: {path} can't be read ({error}); give a text file"))
    if not token:
        fail(usage(f"--token-file: {path} is empty; put the token in it"))
    return token


@app.command("status")
def _status(context: typer.Context) -> None:
    """Nodes with roles, queues and KV, and services with their health."""
    options = options_of(context)
    found = run(context, status.gather)
    if options.json:
        output.print_json(status.as_json(found, options.partition))
    else:
        status.print_status(found, options.partition)


@split_app.command("show")
def _split_show(context: typer.Context) -> None:
    """The split in force and the live nodes."""
    answer = run(context, split.read_split)
    if options_of(context).json:
        output.print_json(plain(answer))
    else:
        split.print_split(answer)


@split_app.command("set")
def _split_set(
    context: typer.Context,
    proposal: Annotated[
        list[str],
        typer.Argument(
            metavar="2P1D | NODE=ROLE…",
            help="how many nodes prefill and decode, or the roles of some nodes: prefill, decode, mixed, draining",
        ),
    ],
    reason: Annotated[str, typer.Option(help="kept with the decision")] = "",
    expected_epoch: Annotated[
        int, typer.Option(min=0, help="refuse if the split changed since this epoch; 0: whatever it is")
    ] = 0,
    hold_s: Annotated[
        float, typer.Option("--hold-s", min=0.0, help="hold it for so many seconds; 0: until released")
    ] = 0.0,
    no_hold: Annotated[bool, typer.Option("--no-hold", help="the planner may change it again")] = False,
) -> None:
    """Set the split. It takes effect at once, interrupts nothing, and holds until evolvectl plan release, or for
    --hold-s, whatever the planner measures."""
    if hold_s and no_hold:
        fail(usage("give one of --hold-s and --no-hold"))

    async def propose(cluster: Cluster) -> planner_pb2.Split:
        request = split.parse_proposal(proposal)
        request.reason, request.expected_epoch = reason, expected_epoch
        request.hold_s, request.no_hold = hold_s, no_hold
        return await split.propose_split(cluster, request)

    after = run(context, propose)
    if options_of(context).json:
        output.print_json(plain(after))
    else:
        split.print_set(after, hold_s=hold_s, no_hold=no_hold)


@app.command("decisions")
def _decisions(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="at most so many, newest first")] = 20,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="with what each was decided from: splits, slices, models")
    ] = False,
) -> None:
    """What the planner and operators decided, and why."""
    decisions = run(context, lambda cluster: split.read_decisions(cluster, limit, with_evaluations=verbose))
    if options_of(context).json:
        output.print_json({"decisions": [plain(decision) for decision in decisions]})
    elif verbose:
        split.print_evaluations(decisions)
    else:
        split.print_decisions(decisions)


@branch_app.command("ls")
def _branch_ls(
    context: typer.Context,
    tenant: Annotated[str, typer.Option(help="only this tenant's")] = "",
    ended: Annotated[bool, typer.Option("--ended", help="ended ones too")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="at most so many")] = 100,
) -> None:
    """Branches, by tenant and id."""
    branches, truncated = run(context, lambda cluster: directory.list_branches(cluster, tenant, ended, limit))
    if options_of(context).json:
        output.print_json({"branches": [plain(branch) for branch in branches], "truncated": truncated})
    else:
        directory.print_branches(branches, truncated)


@branch_app.command("show")
def _branch_show(
    context: typer.Context,
    branch_id: Annotated[str, typer.Argument(metavar="ID")],
    tenant: Annotated[str, typer.Option(help="whose")] = "default",
) -> None:
    """One branch: version, context, counts and the nodes its blocks are counted on."""
    branch = run(context, lambda cluster: directory.read_branch(cluster, tenant, branch_id))
    if options_of(context).json:
        output.print_json(plain(branch))
    else:
        directory.print_branch(branch)


@block_app.command("show")
def _block_show(
    context: typer.Context, name: Annotated[str, typer.Argument(metavar="HEX", help="32 hex digits")]
) -> None:
    """One block: its copies, their counts and the branches that have it."""
    block = run(context, lambda cluster: directory.read_block(cluster, name))
    if options_of(context).json:
        output.print_json({"name": name.lower(), **plain(block)})
    else:
        directory.print_block(name, block)


@app.command("audit")
def _audit(context: typer.Context) -> None:
    """Compare the counts of every block on every node, and what the node evicts by. Exits 1 on a mismatch, 3 if a node
    did not answer."""
    answer = run(context, directory.audit)
    if options_of(context).json:
        output.print_json({"clean": directory.is_clean(answer), **plain(answer)})
    else:
        directory.print_audit(answer)
    if not directory.is_clean(answer):
        fail(
            refused(
                "counts and what nodes evict by don't agree; if requests were running, audit again when they are done"
            )
        )
    if answer.unreachable_node_ids:
        fail(unreachable(f"no answer from {', '.join(answer.unreachable_node_ids)}; see evolvectl status"))


@app.command("models")
def _models(context: typer.Context) -> None:
    """What the live nodes serve."""
    answer = run(context, models.list_models)
    if options_of(context).json:
        output.print_json(plain(answer))
    else:
        models.print_models(answer)


@app.command("generate")
def _generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="the user's message; left out or -: standard input")] = "-",
    system: Annotated[str, typer.Option(help="a system message before it")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="the prompt as it is, without the model's chat template")] = False,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="the prompt is token ids, and so is what is printed")
    ] = False,
    branch: Annotated[str, typer.Option(help="id of the branch it belongs to; left out: none")] = "",
    model: Annotated[str, typer.Option(help="left out: the only one served")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="output tokens at most")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
) -> None:
    """Generate once. The text goes to standard output as it comes, a line about it to standard error."""
    text = sys.stdin.read() if prompt == "-" else prompt
    as_json = options_of(context).json

    async def generate(cluster: Cluster) -> Finished:
        asked = models.read_ask(text, system=system, raw=raw, token_ids=token_ids)
        ask = replace(asked, branch_id=branch, model=model, max_tokens=max_tokens, temperature=temperature)
        return await models.generate(cluster, ask, stream=not as_json)

    finished = run(context, generate)
    if as_json:
        output.print_json(models.as_json(finished))
    else:
        typer.echo()
        typer.echo(models.summary(finished), err=True)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="evolvectl")
