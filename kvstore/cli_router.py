"""`pd-router`: one address in front of prefill and decode instances. Needs the `router` extra."""

from __future__ import annotations

import asyncio
import importlib.util

import click

from kvstore import errors, log
from kvstore.cli import Seconds
from kvstore.config import parse_bytes
from kvstore.router.settings import RouterSettings, router_settings

_SECONDS = Seconds(min=0, min_open=True)


def _default(name: str) -> object:
    """The default of a setting, which stands in one place."""
    return RouterSettings.__dataclass_fields__[name].default


@click.command("pd-router")
@click.option(
    "--prefill", multiple=True, required=True, metavar="URL", help="A prefill instance, http://HOST:PORT; repeatable."
)
@click.option(
    "--decode", multiple=True, required=True, metavar="URL", help="A decode instance, http://HOST:PORT; repeatable."
)
@click.option(
    "--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Where clients connect."
)
@click.option(
    "--max-requests",
    "requests_max",
    type=click.IntRange(min=1),
    default=_default("requests_max"),
    show_default=True,
    metavar="N",
    help="Requests at a time; one more is answered 429.",
)
@click.option("--max-body", default="64MiB", show_default=True, metavar="SIZE", help="Largest body of a request.")
@click.option(
    "--prefill-timeout",
    "prefill_timeout_s",
    type=_SECONDS,
    default=_default("prefill_timeout_s"),
    show_default=True,
    metavar="SECONDS",
    help="Longest time for prefill; then the decode instance computes the prompt itself.",
)
@click.option(
    "--decode-timeout",
    "decode_timeout_s",
    type=_SECONDS,
    default=_default("decode_timeout_s"),
    show_default=True,
    metavar="SECONDS",
    help="Longest silence of a decode instance; an answer that is not streamed is one silence.",
)
@click.option(
    "--connect-timeout",
    "connect_timeout_s",
    type=_SECONDS,
    default=_default("connect_timeout_s"),
    show_default=True,
    metavar="SECONDS",
    help="Longest time to connect to an instance.",
)
@click.option(
    "--health-interval",
    "health_interval_s",
    type=_SECONDS,
    default=_default("health_interval_s"),
    show_default=True,
    metavar="SECONDS",
    help="Pause between two looks at an instance's /health.",
)
@click.option(
    "--health-timeout",
    "health_timeout_s",
    type=_SECONDS,
    default=_default("health_timeout_s"),
    show_default=True,
    metavar="SECONDS",
    help="How long a look may take; after three that took longer the instance counts as down.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=_default("retries"),
    show_default=True,
    metavar="N",
    help="Further instances that are tried after one failed before its first byte.",
)
@click.option(
    "--drain",
    "drain_s",
    type=_SECONDS,
    default=_default("drain_s"),
    show_default=True,
    metavar="SECONDS",
    help="How long running requests may go on after SIGTERM.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least important lines that are written.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "console", "json"]),
    default="auto",
    show_default=True,
    help="How lines are written; auto is console on a terminal and json elsewhere.",
)
def pd_router(
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    listen: str,
    max_body: str,
    log_level: str,
    log_format: str,
    **numbers: float,
) -> int:
    """Serve one OpenAI-compatible address in front of prefill and decode instances of vLLM.

    A prefill instance computes the prompt and stores its KV blocks in kvstore; a decode instance gets the prompt's
    token ids, loads the blocks and answers. Runs in the foreground until SIGTERM or Ctrl-C.
    """
    settings = router_settings(prefill, decode, listen, body_bytes_max=parse_bytes(max_body, "--max-body"), **numbers)
    if importlib.util.find_spec("aiohttp") is None:
        raise errors.ConfigError("pd-router needs aiohttp: pip install 'kvstore-offload[router]'")
    from kvstore.router.server import serve

    log.configure(log_level, log_format)
    return asyncio.run(serve(settings))
