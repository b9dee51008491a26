"""A prefill client and a decode client, each at the daemon of its own host: the second one gets what the first stored.

The two know nothing of each other but the seed. The decode client waits for each prompt of the conversations to be
there as a whole, loads it through its own daemon, and compares every byte. docker-compose.yml runs this.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click
from rich.console import Console

from bench.conversations import Shape, chained_keys, script
from bench.demo import BLOCK_SIZE, PATIENCE_S, Engine, Plan, Report
from kvstore.admin import AdminClient
from kvstore.config import parse_bytes

#: Between two looks at another process.
_LOOK_S = 0.05


def prompts(plan: Plan) -> list[list[bytes]]:
    """Keys of the last prompt of each conversation: it has those of the earlier ones in front."""
    last = {turn.conversation: turn.prompt for turn in script(plan.seed, plan.shape)}
    return [chained_keys(prompt, BLOCK_SIZE) for prompt in last.values()]


def wait_for_tiers(endpoint: str, copied: bool = False) -> dict[str, Any]:
    """Waits until all tiers are well, and with `copied` until all that was stored is in them. Returns the stats.

    Raises:
        click.ClickException: not within PATIENCE_S.
    """
    give_up = time.monotonic() + PATIENCE_S
    with AdminClient(endpoint, timeout_s=PATIENCE_S) as admin:
        while True:
            stats = admin.stats()
            states = {tier["name"]: tier["state"] for tier in stats["tiers"]}
            if set(states.values()) <= {"ok", "populating"} and not (copied and stats["transfers"]["queued_bytes"]):
                return stats
            if time.monotonic() > give_up:
                raise click.ClickException(f"the tiers of {endpoint} are {states}")
            time.sleep(_LOOK_S)


def prefill(plan: Plan) -> Report:
    """Stores the prompts and waits until every tier has them."""
    report = Report("prefill")
    engine = Engine(plan, "prefill")
    with engine.client:
        wait_for_tiers(plan.endpoint)
        for keys in prompts(plan):
            engine.store(keys, engine.load(keys, report), report)
            # A pool that is smaller than all of them would have to drop what could not be copied in time.
            wait_for_tiers(plan.endpoint, copied=True)
    return report


def decode(plan: Plan) -> Report:
    """Loads the prompts, each as soon as it is there.

    Raises:
        click.ClickException: one is not within PATIENCE_S.
    """
    report = Report("decode")
    engine = Engine(plan, "decode")
    with engine.client:
        for number, keys in enumerate(prompts(plan)):
            give_up = time.monotonic() + PATIENCE_S
            while (there := engine.client.lookup(keys)) < len(keys):
                if time.monotonic() > give_up:
                    raise click.ClickException(f"of prompt {number}, {there} of {len(keys)} blocks are there")
                time.sleep(_LOOK_S)
            engine.load(keys, report, PATIENCE_S)
    return report


def summary(plan: Plan, report: Report) -> str:
    """What was done, in one line."""
    with AdminClient(plan.endpoint, timeout_s=PATIENCE_S) as admin:
        stats = admin.stats()
    hits = ", ".join(f"{count} from {tier}" for tier, count in stats["hits"].items() if count)
    return (
        f"{report.role}: {report.stored} blocks stored, {report.loaded} of {report.asked} loaded, "
        f"{report.wrong} wrong; hits of its daemon: {hits or 'none'}"
    )


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@click.option("--endpoint", required=True, help="The daemon of this host.")
@click.option("--seed", default=1, help="Of the conversations; the same for both.")
@click.option("--conversations", default=4, type=click.IntRange(min=1), help="The same for both.")
@click.option("--turns", default=3, type=click.IntRange(min=1), help="The same for both.")
@click.option("--block-bytes", default="256KiB", help="Size of a block of 64 tokens; the same for both.")
def main(role: str, endpoint: str, seed: int, conversations: int, turns: int, block_bytes: str) -> None:
    """Store prompts (prefill), or load them and check every byte (decode)."""
    shape = Shape(conversations=conversations, turns=turns)
    plan = Plan(endpoint, seed, shape, parse_bytes(block_bytes, "--block-bytes"))
    report = prefill(plan) if role == "prefill" else decode(plan)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(summary(plan, report), soft_wrap=True)
    if report.wrong or report.refused or (role == "decode" and report.loaded != report.asked):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
