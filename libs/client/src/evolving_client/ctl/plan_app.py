"""The commands of `evolvectl plan` and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from evolving_client.ctl import evaluation, output, plan, split
from evolving_client.ctl.command import options_of, run
from evolving_client.ctl.plain import plain

plan_app = typer.Typer(
    help="What the planner measured, and what it makes of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@plan_app.command("show")
def _show(context: typer.Context) -> None:
    """Mode, leader, hold, and the last decision by measurement. With the splits and slices it compared."""
    answer, decision = run(context, plan.read_plan)
    if options_of(context).json:
        output.print_json(plan.plan_json(answer, decision))
    else:
        plan.print_plan(answer, decision)


@plan_app.command("what-if")
def _what_if(
    context: typer.Context,
    shape: Annotated[str, typer.Argument(metavar="5P4D", help="left out: all splits", show_default=False)] = "",
) -> None:
    """What a split would serve, by what was measured up to now. It changes and records nothing."""
    answer = run(context, lambda cluster: plan.evaluate(cluster, shape))
    if options_of(context).json:
        output.print_json(plain(answer))
    else:
        plan.print_what_if(answer, shape)


@plan_app.command("model")
def _model(context: typer.Context) -> None:
    """What iterations take on each node, and how well that is known."""
    answer = run(context, plan.read_models)
    if options_of(context).json:
        output.print_json(plain(answer))
    else:
        evaluation.print_models(answer.nodes)


@plan_app.command("refit")
def _refit(
    context: typer.Context,
    node_ids: Annotated[
        list[str] | None, typer.Argument(metavar="NODE", help="left out: all", show_default=False)
    ] = None,
) -> None:
    """Fit time models anew to what nodes reported lately. Where that is too little, what was known stays."""
    answer = run(context, lambda cluster: plan.refit(cluster, node_ids or []))
    if options_of(context).json:
        output.print_json(plain(answer))
    else:
        asked = [model for model in answer.nodes if not node_ids or model.node_id in node_ids]
        evaluation.print_models(asked)
        evaluation.print_not_fitted(asked)


@plan_app.command("hold")
def _hold(
    context: typer.Context,
    for_s: Annotated[
        float,
        typer.Option("--for-s", min=0.0, help="for so many seconds; left out or 0: until released", show_default=False),
    ] = 0.0,
    reason: Annotated[str, typer.Option(help="kept with the decision", show_default=False)] = "",
) -> None:
    """Let the planner leave the split as it is. Nodes that come and go are followed all the same."""
    after = run(context, lambda cluster: plan.hold(cluster, for_s, reason))
    if options_of(context).json:
        output.print_json(plain(after))
    else:
        split.print_set(after, hold_s=for_s, no_hold=False)


@plan_app.command("release")
def _release(
    context: typer.Context,
    reason: Annotated[str, typer.Option(help="kept with the decision", show_default=False)] = "",
) -> None:
    """End a hold. In mode auto measurements decide again, from the next window on."""
    after = run(context, lambda cluster: plan.release(cluster, reason))
    if options_of(context).json:
        output.print_json(plain(after))
    else:
        plan.print_released(after)
