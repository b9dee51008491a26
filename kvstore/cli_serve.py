"""The commands that read the daemon's settings: `serve` and `config`. Their flags are made from config.Settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from kvstore.config import Settings
from kvstore.config_sources import CONFIG_VARIABLE, FLAGS, Origin, flag_of, gather, load_settings


def _settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """One flag per setting. Values are passed on as written; config checks them and names the flag."""
    for name in reversed(FLAGS):
        field = Settings.model_fields[name]
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        unshown = field.default_factory or field.is_required() or field.default in (None, ())
        shown_default = "" if unshown else str(field.default).lower() if field.default is False else field.default
        function = click.option(
            flag_of(name),
            name,
            metavar=str(extra["metavar"]),
            multiple=name in ("listen", "disk_dir", "peer"),
            help=f"{field.description}{f'  [default: {shown_default}]' if shown_default != '' else ''}",
        )(function)
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help=f"TOML file with settings; its keys are the flags with underscores. Default: ${CONFIG_VARIABLE}.",
    )(function)


@click.command()
@_settings_options
def serve(config_path: Path | None, **flags: Any) -> int:
    """Run the daemon in the foreground until SIGTERM or Ctrl-C.

    Every flag is also a variable (--cpu-bytes: KVSTORE_CPU_BYTES) and a key in the --config file (cpu_bytes); a flag
    wins over a variable, and a variable over the file.
    """
    settings = load_settings(flags, config_path)
    from kvstore import daemon, log

    log.configure(settings.log_level, settings.log_format)
    return daemon.run(settings)


@click.command()
@_settings_options
def config(config_path: Path | None, **flags: Any) -> None:
    """Print the settings that `serve` would run with, as TOML.

    A comment says where each came from. Ends with 2 where `serve` would refuse them.
    """
    settings = load_settings(flags, config_path)
    if settings.redis_url is not None:
        from kvstore.tiers.redis_url import parse_redis_url

        # Passwords are for the server alone.
        shown = parse_redis_url(settings.redis_url).scrub(settings.redis_url)
        settings = settings.model_copy(update={"redis_url": shown})
    origins = gather(flags, config_path, os.environ)
    in_tables = tuple(f"{kind}_" for kind in settings.tiers)
    for name in FLAGS:
        if not name.startswith(in_tables):
            _print_setting(settings, origins, name, name)
    click.echo(f"# the order of the tiers: {' -> '.join(('cpu', *settings.tier_order))}")
    # Tables come last in TOML: what follows one belongs to it.
    for kind in settings.tiers:
        click.echo(f'\n[[tiers]]\nkind = "{kind}"')
        for name in FLAGS:
            if name.startswith(f"{kind}_"):
                _print_setting(settings, origins, name, name.removeprefix(f"{kind}_"))


def _print_setting(settings: Settings, origins: Mapping[str, Origin], name: str, shown_name: str) -> None:
    value = getattr(settings, name)
    place = origins[name].place if name in origins else "default"
    if value is None:
        click.echo(f"# {shown_name} is not set")
    else:
        click.echo(f"{shown_name} = {_toml(value)}  # {place}")


def _toml(value: Any) -> str:
    """A setting in TOML. Its strings and numbers are written like JSON's."""
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value if isinstance(value, (int, float)) else str(value))
