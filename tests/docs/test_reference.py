"""The documents say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

from kvstore.cli import ExitCode, kvstore
from kvstore.config import Limits
from kvstore.config_sources import FILE_ONLY, FLAGS, flag_of, variable_of
from kvstore.metrics import FAMILIES
from tests.ops.stats_sample import stats_sample

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("name", ["cli.md", "config.md", "stats.md"])
def test_generated_parts_are_fresh(name: str) -> None:
    assert generator().refreshed(text_of(name)) == text_of(name), "run `make docs`"


def test_every_command_and_option_is_documented_and_has_help() -> None:
    document = text_of("cli.md")
    context = click.Context(kvstore)
    for name in kvstore.list_commands(context):
        command = kvstore.get_command(context, name)
        assert command is not None and command.help, name
        assert f"### kvstore {name}\n" in document
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help and parameter.help.endswith((".", "]")), f"{name} {parameter.name}"
                if name not in ("serve", "config"):
                    assert f"`{parameter.opts[0]}" in document


def test_every_exit_code_is_documented() -> None:
    for code in ExitCode:
        assert re.search(rf"^\| {code.value} \|", text_of("cli.md"), re.MULTILINE)


def test_every_setting_is_documented_under_its_three_names() -> None:
    document = text_of("config.md")
    for name in FLAGS:
        assert f"| `{name}` | `{flag_of(name)} " in document
        assert f"`{variable_of(name)}`" in document
    for name in FILE_ONLY:
        assert f"| `{name}` | - | - |" in document


def test_every_limit_is_documented_with_a_reason() -> None:
    for name in Limits.__slots__:
        assert re.search(rf"^\| `{name}` \| \S+ \| .{{20,}} \|$", text_of("config.md"), re.MULTILINE)


def test_every_metric_is_documented() -> None:
    for family in FAMILIES:
        assert f"| `{family.shown_name}` |" in text_of("stats.md")


def test_every_key_of_the_stats_tree_is_documented() -> None:
    """tests/ops/test_admin.py compares the sample with the tree of a real daemon."""
    tree = text_of("stats.md").partition("## The tree")[2].partition("## Metrics")[0]
    words = set(re.findall(r"`([\w.\[\]]+)`", tree))
    stats = stats_sample()
    for key in stats:
        assert key in words, key
    tier = stats["tiers"][0]
    for key in tier:
        assert f"tiers[].{key}" in words, key
    inner = [tier["backing"], tier["classes"][0], stats["namespaces"][0], stats["namespaces"][0]["groups"][0]]
    for branch in [*inner, stats["sessions"][0]]:
        assert set(branch) <= words, set(branch) - words
