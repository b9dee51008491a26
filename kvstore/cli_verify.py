"""The command that checks a directory of the disk tier: `verify`. For a directory that no daemon uses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from kvstore.cli import ExitCode, progress_bar
from kvstore.errors import ConfigError
from kvstore.tiers.verify import VerifyReport
from kvstore.tiers.verify import verify as verify_directory


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Drop what is damaged from the index; build an index anew that is lost.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(directory: Path, repair: bool, as_json: bool) -> None:
    """Read every block in DIRECTORY, a --disk-dir that no daemon uses now, and say which are right.

    Ends with 5 where something is damaged and --repair was not given.
    """
    with progress_bar("verifying") as advance:
        try:
            report = verify_directory(directory, repair, advance)
        except OSError as error:
            raise ConfigError(f"{directory}: {error.strerror}") from error
    if as_json:
        tree = dataclasses.asdict(report)
        tree["directory"] = str(report.directory)
        for block in tree["damaged"]:
            block["key"] = block["key"].hex()
        click.echo(json.dumps({**tree, "ok": report.ok}))
    else:
        _print(report)
    if not report.ok:
        raise SystemExit(ExitCode.DEGRADED)


def _print(report: VerifyReport) -> None:
    click.echo(f"{report.directory}: {report.slabs} slabs, {report.extents} extents")
    click.echo(f"{report.blocks_ok} blocks are right, {report.bytes_ok} bytes")
    if report.unnamed:
        click.echo(f"{report.unnamed} more blocks are whole and in no index: evicted or deleted")
    if report.index_fault:
        click.echo(f"the index cannot be used: {report.index_fault}")
    for block in report.damaged:
        click.echo(f"damaged: {block.key.hex()} (slab {block.slab}, extent {block.extent}): {block.why}")
    if report.rebuilt_blocks:
        click.echo(f"an index of {report.rebuilt_blocks} blocks was built anew")
    if report.repaired:
        click.echo("repaired")
    elif not report.ok:
        click.echo("run it again with --repair to drop what is damaged; then it is a miss, and stored anew when needed")
