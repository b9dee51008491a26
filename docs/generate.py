"""Writes the generated parts of the documents in this folder anew, from the code.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. With ``--check`` nothing is written, and the
exit code is 1 if a part is stale; tests/docs does the same.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from kvstore.cli import EXIT_CODE_HELP, kvstore
from kvstore.config import Limits, Settings
from kvstore.config_sources import FILE_ONLY, flag_of, variable_of
from kvstore.metrics import FAMILIES

FOLDER = Path(__file__).parent
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def commands() -> str:
    """Every command with its arguments and flags."""
    context = click.Context(kvstore, info_name="kvstore")
    lines: list[str] = []
    for name in kvstore.list_commands(context):
        command = kvstore.get_command(context, name)
        assert command is not None
        lines += [f"### kvstore {name}", "", *_paragraphs(command.help or ""), ""]
        arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
        usage = " ".join(
            ["kvstore", name, "[OPTIONS]", *(f"[{parameter.human_readable_name}]" for parameter in arguments)]
        )
        lines += ["```", usage, "```", ""]
        if name in ("serve", "config"):
            lines += ["Options: `--config FILE`, and every setting of [config.md](config.md) as a flag.", ""]
            continue
        lines += ["| option | meaning |", "|---|---|"]
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                metavar = f" {parameter.metavar}" if parameter.metavar else ""
                default = f" Default: {parameter.default}." if parameter.show_default else ""
                lines.append(
                    f"| `{'`, `'.join(parameter.opts)}{metavar}` | {_cell((parameter.help or '') + default)} |"
                )
        lines.append("")
    return "\n".join(lines)


def exit_codes() -> str:
    """Every exit code."""
    rows = [f"| {code.value} | {_cell(meaning)} |" for code, meaning in EXIT_CODE_HELP.items()]
    return "\n".join(["| code | meaning |", "|---|---|", *rows, ""])


def settings() -> str:
    """Every setting with its three names."""
    lines = ["| TOML key | flag | variable | unit | default | meaning |", "|---|---|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        assert isinstance(field.json_schema_extra, dict)
        if field.is_required():
            default = "required"
        elif field.default_factory is not None:
            default = "see there"
        else:
            unset = field.default in (None, ())
            default = "none" if unset else f"`{'false' if field.default is False else field.default}`"
        flag, variable = f"`{flag_of(name)} {_cell(str(field.json_schema_extra['metavar']))}`", f"`{variable_of(name)}`"
        if name in FILE_ONLY:
            flag = variable = "-"
        lines.append(
            f"| `{name}` | {flag} | {variable} "
            f"| {field.json_schema_extra['unit']} | {default} | {_cell(field.description or '')} |"
        )
    return "\n".join([*lines, ""])


def limits() -> str:
    """Every limit of the wire, with its reason from the docstring of Limits."""
    reasons = dict(
        re.findall(r"^    (\w+): (.+(?:\n        .+)*)", inspect.cleandoc(Limits.__doc__ or ""), re.MULTILINE)
    )
    values = Limits()
    lines = ["| limit | value | reason |", "|---|---|---|"]
    for name in Limits.__slots__:
        reason = " ".join(reasons[name].split())
        lines.append(f"| `{name}` | {getattr(values, name)} | {_cell(reason)} |")
    return "\n".join([*lines, ""])


def metrics() -> str:
    """Every metric."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
        lines.append(f"| `{family.shown_name}` | {family.kind} | {labels} | {_cell(family.help)} |")
    return "\n".join([*lines, ""])


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "exit_codes": exit_codes,
    "settings": settings,
    "limits": limits,
    "metrics": metrics,
}


def refreshed(text: str) -> str:
    """A document with its generated parts made anew."""
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match[2]]().strip()}\n\n{match[3]}", text)


def _paragraphs(text: str) -> list[str]:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")).splitlines()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    stale = 0
    for path in sorted(FOLDER.glob("*.md")):
        before = path.read_text()
        after = refreshed(before)
        if before != after:
            stale += 1
            print(f"{path.name} {'is stale' if '--check' in sys.argv else 'written'}")
            if "--check" not in sys.argv:
                path.write_text(after)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
