"""``kvstore ...``: the operator's commands. Thin over AdminClient; `serve` and `config` live in cli_serve.

Start-up time is part of the promise of `serve` and of every script that calls `ping`, so what a command alone needs
(gRPC, rich, pydantic) is imported inside it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore import __version__, errors

if TYPE_CHECKING:
    from kvstore.admin import AdminClient

#: Pause between two attempts of `ping --wait`.
PING_PAUSE_S: Final = 0.05
#: The daemon lists no more at once.
_LIST_MAX: Final = 10_000


class ExitCode(enum.IntEnum):
    """What a command ends with."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    REFUSED = 4
    DEGRADED = 5
    ALREADY_RUNNING = 6
    INTERRUPTED = 130


#: What each code means; docs/cli.md prints it.
EXIT_CODE_HELP: Final[Mapping[ExitCode, str]] = {
    ExitCode.OK: "done",
    ExitCode.FAILED: "something else went wrong; the line on stderr says what",
    ExitCode.USAGE: "a flag, a variable or the config file is wrong",
    ExitCode.NO_DAEMON: "no daemon answers at the endpoint, or not in time",
    ExitCode.REFUSED: "the daemon answered and refused: token, limit, a namespace it does not know, draining",
    ExitCode.DEGRADED: "`stats --check` found something that needs attention",
    ExitCode.ALREADY_RUNNING: "`serve`: another daemon holds the socket",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
}

# The first class that fits decides, so the narrow ones come first.
_CODES: Final[tuple[tuple[type[errors.KVStoreError], ExitCode], ...]] = (
    (errors.ConfigError, ExitCode.USAGE),
    (errors.DaemonUnavailable, ExitCode.NO_DAEMON),
    (errors.DeadlineExceeded, ExitCode.NO_DAEMON),
    (errors.AlreadyRunning, ExitCode.ALREADY_RUNNING),
    (errors.CallerMistake, ExitCode.REFUSED),
    (errors.Draining, ExitCode.REFUSED),
    (errors.KVStoreError, ExitCode.FAILED),
)


class Seconds(click.FloatRange):
    """A time. Unlike its base it takes no `nan`, which is in no range and outside of none, and no `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


class _Group(click.Group):
    """Loads the commands that need pydantic only when one of them is asked for."""

    LAZY: Final[Mapping[str, str]] = {
        "pd-router": "kvstore.cli_router",
        "serve": "kvstore.cli_serve",
        "config": "kvstore.cli_serve",
        "verify": "kvstore.cli_verify",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.LAZY:
            command: click.Command = getattr(importlib.import_module(self.LAZY[cmd_name]), cmd_name.replace("-", "_"))
            return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvstore")
def kvstore() -> None:
    """A KV-cache service for inference engines on one host: the daemon and what an operator asks of it."""


def client_command(function: Callable[..., None]) -> Callable[..., None]:
    """Options of every command that calls a daemon; the command gets an AdminClient as its first argument."""

    @click.option(
        "--endpoint",
        metavar="ENDPOINT",
        help="Daemon to call: unix:PATH or HOST:PORT. Default: $KVSTORE_ENDPOINT, else "
        "unix:$XDG_RUNTIME_DIR/kvstore/kvstore.sock, else unix:/run/kvstore/kvstore.sock.",
    )
    @click.option(
        "--token-file",
        metavar="FILE",
        envvar="KVSTORE_TOKEN_FILE",
        help="File with the bearer token of a HOST:PORT endpoint. Default: $KVSTORE_TOKEN_FILE.",
    )
    @click.option(
        "--tls-ca",
        metavar="FILE",
        envvar="KVSTORE_TLS_CA",
        help="CA certificates (PEM) of a HOST:PORT endpoint that speaks TLS. Default: $KVSTORE_TLS_CA, else no TLS.",
    )
    @click.option(
        "--tls-cert",
        metavar="FILE",
        envvar="KVSTORE_TLS_CERT",
        help="Certificate (PEM) to show there, with --tls-key, where it asks for one. Default: $KVSTORE_TLS_CERT.",
    )
    @click.option(
        "--tls-key", metavar="FILE", envvar="KVSTORE_TLS_KEY", help="Its key (PEM). Default: $KVSTORE_TLS_KEY."
    )
    @click.option(
        "--timeout",
        type=Seconds(min=0, min_open=True),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="Deadline of each call.",
    )
    @functools.wraps(function)
    def wrapped(
        endpoint: str | None,
        token_file: str | None,
        tls_ca: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        timeout: float,
        **arguments: Any,
    ) -> None:
        from kvstore.admin import AdminClient
        from kvstore.endpoint import default_endpoint, parse_endpoint
        from kvstore.secret import read_token
        from kvstore.wire.tls import Tls

        try:
            place = default_endpoint() if endpoint is None else parse_endpoint(endpoint)
        except errors.InvalidRequest as error:
            raise errors.ConfigError(str(error)) from error
        token = read_token(token_file) if token_file else None
        tls = Tls(tls_ca, tls_cert, tls_key) if tls_ca else None
        with AdminClient(place, token, timeout_s=timeout, tls=tls) as client:
            try:
                function(client, **arguments)
            except (KeyError, TypeError):
                version = client.ping().version
                if version == __version__:
                    raise
                raise errors.KVStoreError(
                    f"the daemon at {place} is kvstore {version} and its figures are not those of this command"
                    f" ({__version__}): install the same version, or read them with `kvstore stats --json`"
                ) from None

    return wrapped


@kvstore.command()
@click.option("--json", "as_json", is_flag=True, help="Print the whole tree as one JSON object.")
@click.option("--prometheus", is_flag=True, help="Print Prometheus text.")
@click.option("--check", is_flag=True, help="Print what needs attention, and end with 5 if anything does.")
@click.option(
    "--watch",
    type=Seconds(min=0.1),
    metavar="SECONDS",
    help="Show it again every so often, with rates, until Ctrl-C; with --json, one object a line.",
)
@client_command
def stats(client: AdminClient, as_json: bool, prometheus: bool, check: bool, watch: float | None) -> None:
    """Show tiers, namespaces, sessions, leases, hits and misses.

    A tier that is `ok` or `populating` (pages are still being put in place behind the service) is well.
    """
    if sum((as_json, prometheus, check)) > 1:
        raise click.UsageError("choose one of --json, --prometheus and --check")
    if watch is not None:
        if prometheus or check:
            raise click.UsageError("--watch goes with the tables or with --json")
        _watch(client, watch, as_json)
        return
    tree = client.stats()
    if as_json:
        click.echo(json.dumps(tree, indent=2))
    elif prometheus:
        from kvstore.metrics import exposition

        click.echo(exposition(tree), nl=False)
    else:
        from kvstore import health, render

        if check:
            findings = health.unhealthy(tree)
            click.echo("; ".join(findings) or "ok")
            if findings:
                raise SystemExit(ExitCode.DEGRADED)
        else:
            render.console_for(sys.stdout).print(render.stats_view(tree))


def _watch(client: AdminClient, every_s: float, as_json: bool) -> None:
    """Shows stats until Ctrl-C. A daemon that is restarted meanwhile is waited for."""
    # A first call that fails is an error as in any other command.
    tree = client.stats()
    if as_json:
        while True:
            click.echo(json.dumps(tree))
            tree = _next_tree(client, every_s)
    from rich.live import Live

    from kvstore import render

    console = render.console_for(sys.stdout)
    before: Mapping[str, Any] | None = None
    if not console.is_terminal:
        while True:
            console.print(render.stats_view(tree, before))
            before, tree = tree, _next_tree(client, every_s)
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while True:
            live.update(render.stats_view(tree, before), refresh=True)
            before, tree = tree, _next_tree(client, every_s)


def _next_tree(client: AdminClient, every_s: float) -> dict[str, Any]:
    absent = False
    while True:
        sys.stdout.flush()
        time.sleep(every_s)
        try:
            return client.stats()
        except errors.RetryLater as error:
            if not absent:
                click.echo(f"kvstore: {error}; waiting for it", err=True)
            absent = True


@kvstore.command()
@click.option(
    "--wait",
    type=Seconds(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Keep trying for so long where no daemon answers.",
)
@client_command
def ping(client: AdminClient, wait: float) -> None:
    """Ask the daemon for a sign of life."""
    give_up = time.monotonic() + wait
    while True:
        started = time.monotonic()
        try:
            reply = client.ping()
            break
        except errors.RetryLater:
            if time.monotonic() + PING_PAUSE_S > give_up:
                raise
            time.sleep(PING_PAUSE_S)
    took_ms = (time.monotonic() - started) * 1000
    click.echo(
        f"{client.endpoint}: kvstore {reply.version}, pid {reply.pid}, up {reply.uptime_s:.1f} s, "
        f"generation {reply.generation.hex()[:12]}, answered in {took_ms:.1f} ms"
    )


@kvstore.command()
@click.argument("namespace", required=False)
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=_LIST_MAX),
    default=100,
    show_default=True,
    metavar="N",
    help=f"Most blocks to list, {_LIST_MAX} at most.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a block and line.")
@client_command
def ls(client: AdminClient, namespace: str | None, limit: int, as_json: bool) -> None:
    """List blocks of NAMESPACE (the first digits of its digest), or of all namespaces."""
    digest = None if namespace is None else _resolve(client.stats(), namespace)
    blocks, total = client.list_blocks(digest, limit)
    if as_json:
        for block in blocks:
            line = {
                "namespace": block.namespace.hex(),
                "group": block.group,
                "key": block.key.hex(),
                "size_bytes": block.size_bytes,
                "pins": block.pins,
                "tiers": list(block.tiers),
            }
            click.echo(json.dumps(line))
        return
    from kvstore import render

    render.console_for(sys.stdout).print(render.blocks_view(blocks, total))


@kvstore.command()
@click.argument("namespace", required=False)
@click.option("--all", "everything", is_flag=True, help="Flush every namespace.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@client_command
def flush(client: AdminClient, namespace: str | None, everything: bool, yes: bool) -> None:
    """Remove the blocks of NAMESPACE (the first digits of its digest) from every tier.

    Blocks that an engine is reading go when it has finished. Prints how many went.
    """
    if (namespace is None) == (not everything):
        raise click.UsageError("name a NAMESPACE (`kvstore stats` lists them) or say --all")
    tree = client.stats()
    digest = None if namespace is None else _resolve(tree, namespace)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("say --yes where nobody can be asked")
        chosen = [entry for entry in tree["namespaces"] if digest is None or entry["digest"] == digest.hex()]
        blocks = sum(group["blocks"] for entry in chosen for group in entry["groups"])
        what = "every namespace" if digest is None else f"namespace {digest.hex()}"
        click.confirm(f"Remove {blocks} blocks of {what} from every tier?", abort=True, err=True)
    click.echo(f"removed {client.flush(digest)} blocks")


@kvstore.command()
@click.option("--free", required=True, metavar="SIZE", help="Bytes that shall be free: 1GB, 1GiB, 1e9 or a number.")
@client_command
def evict(client: AdminClient, free: str) -> None:
    """Evict the coldest blocks until so many bytes of the pool are free.

    Ends with 1 where less is free afterwards, because the rest is pinned.
    """
    from kvstore.config import parse_bytes

    wanted = parse_bytes(free, "--free")
    evicted, free_bytes = client.evict(wanted)
    click.echo(f"evicted {evicted} blocks, {free_bytes} bytes are free")
    if free_bytes < wanted:
        click.echo("kvstore: the rest is pinned or reserved, or the pool is smaller: see `kvstore sessions`", err=True)
        raise SystemExit(ExitCode.FAILED)


@kvstore.command()
@click.argument("namespace", required=False)
@click.option("--all", "everything", is_flag=True, help="Prefetch every namespace.")
@click.option("--max", "max_size", metavar="SIZE", help="Most bytes to bring: 1GB, 1GiB, 1e9. Default: what is free.")
@client_command
def prefetch(client: AdminClient, namespace: str | None, everything: bool, max_size: str | None) -> None:
    """Bring blocks of NAMESPACE (the first digits of its digest) from disk into the free part of the pool.

    Nothing is evicted for them. Prints how many came.
    """
    from kvstore.config import parse_bytes

    if (namespace is None) == (not everything):
        raise click.UsageError("name a NAMESPACE (`kvstore stats` lists them) or say --all")
    limit = parse_bytes(max_size, "--max") if max_size else 0
    tree = client.stats()
    digest = None if namespace is None else _resolve(tree, namespace)
    total = limit or int(tree["tiers"][0]["free_bytes"])
    came = (0, 0)
    with progress_bar("prefetching") as advance:
        for came in client.prefetch(digest, limit):
            advance(came[1], total)
    click.echo(f"brought {came[0]} blocks, {came[1]} bytes")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing in a pipe. Gives what to call with the bytes so far and in all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@kvstore.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a session and line.")
@client_command
def sessions(client: AdminClient, as_json: bool) -> None:
    """Show the engine processes that are attached, and what each holds."""
    entries = client.stats()["sessions"]
    if as_json:
        for entry in entries:
            click.echo(json.dumps(entry))
    elif not entries:
        click.echo("no session is attached")
    else:
        from kvstore import render

        render.console_for(sys.stdout).print(render.sessions_view(entries))


def _resolve(tree: Mapping[str, Any], prefix: str) -> bytes:
    """The digest that begins with some hex digits.

    Raises:
        UnknownNamespace: none or several do.
    """
    digests = [entry["digest"] for entry in tree["namespaces"]]
    found = [digest for digest in digests if digest.startswith(prefix.lower())]
    if len(found) != 1 or not prefix:
        which = f"{len(found)} namespaces begin" if found else "no namespace begins"
        raise errors.UnknownNamespace(f"{which} with {prefix!r}; `kvstore stats` lists {len(digests)} of them")
    return bytes.fromhex(found[0])


def exit_code_of(error: errors.KVStoreError) -> ExitCode:
    """The code that a command ends with when it fails this way."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def _advice(error: errors.KVStoreError) -> str:
    """What to do next, where the error itself cannot know it."""
    if isinstance(error, errors.DaemonUnavailable):
        return ", or name another with --endpoint"
    if isinstance(error, errors.DeadlineExceeded):
        return "; try a longer --timeout"
    if isinstance(error, errors.AccessDenied):
        return "; give the daemon's token with --token-file"
    return ""


def _fail(line: str) -> None:
    click.echo(f"kvstore: {' '.join(line.split())}", err=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line. Errors become one line on stderr; the exit code says which kind (see ExitCode)."""
    try:
        result = kvstore.main(arguments, prog_name="kvstore", standalone_mode=False)
        # Click hands back what a command returned, or the code given to ctx.exit (as by --help).
        return result if isinstance(result, int) else ExitCode.OK
    except click.NoSuchOption as error:
        near = f"; did you mean {error.possibilities[0]}?" if error.possibilities else ""
        _fail(f"no option {error.option_name}{near}{_see_help(error)}")
        return ExitCode.USAGE
    except click.ClickException as error:
        _fail(error.format_message().rstrip(".") + _see_help(error))
        return ExitCode.USAGE
    except errors.KVStoreError as error:
        _fail(f"{error}{_advice(error)}")
        return exit_code_of(error)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK


def _see_help(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"; see `{context.command_path} --help`" if context is not None else ""
