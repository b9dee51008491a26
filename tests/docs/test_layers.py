"""Who may import whom. Read from the source, so that an import inside a function counts as well."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Module of ours -> modules of ours that it may import. A name stands for everything below it.
LAYERS: dict[str, set[str]] = {
    "kvstore": {
        "kvstore.blocks",
        "kvstore.client",
        "kvstore.engine_calls",
        "kvstore.found",
        "kvstore.insert",
        "kvstore.wire.tls",
    },
    "kvstore.errors": set(),
    "kvstore.congestion": {"kvstore.errors"},
    "kvstore.clock": set(),
    "kvstore.outcomes": set(),
    "kvstore.threads": set(),
    "kvstore.machine": set(),
    "kvstore.begun": set(),
    "kvstore.looking": {"kvstore.clock", "kvstore.machine"},
    "kvstore.policy": {"kvstore.blocks"},
    "kvstore.blocks": {"kvstore.errors"},
    "kvstore.endpoint": {"kvstore.errors"},
    "kvstore.secret": {"kvstore.errors"},
    "kvstore.lockfile": {"kvstore.errors"},
    "kvstore.log": {"kvstore.clock"},
    "kvstore.config": {
        "kvstore.blocks",
        "kvstore.congestion",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.machine",
        "kvstore.secret",
        "kvstore.tier_tables",
    },
    "kvstore.config_sources": {
        "kvstore.config",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.machine",
        "kvstore.tier_tables",
    },
    "kvstore.tier_tables": {"kvstore.errors"},
    "kvstore.backing": {"kvstore.blocks", "kvstore.errors"},
    "kvstore.arena": {"kvstore.backing", "kvstore.blocks", "kvstore.errors"},
    "kvstore.population": {"kvstore.backing"},
    "kvstore.handoff": {"kvstore.errors"},
    "kvstore.framed": {"kvstore.begun", "kvstore.errors", "kvstore.log", "kvstore.wire"},
    "kvstore.handoff_server": {"kvstore.blocks", "kvstore.framed", "kvstore.handoff"},
    "kvstore.journal": set(),
    "kvstore.directory": {
        "kvstore.arena",
        "kvstore.journal",
        "kvstore.policy",
        "kvstore.tier",
    },
    "kvstore.leases": {"kvstore.blocks", "kvstore.clock", "kvstore.directory", "kvstore.errors", "kvstore.tier"},
    "kvstore.extents": {"kvstore.directory", "kvstore.leases", "kvstore.tier", "kvstore.transfers"},
    "kvstore.direct": {"kvstore.errors"},
    "kvstore.arrivals": {"kvstore.arena", "kvstore.directory", "kvstore.errors", "kvstore.leases"},
    "kvstore.pool": {"kvstore.arena", "kvstore.directory", "kvstore.policy"},
    "kvstore.transfers": {
        "kvstore.begun",
        "kvstore.clock",
        "kvstore.directory",
        "kvstore.gauge",
        "kvstore.leases",
        "kvstore.pool",
        "kvstore.postponed",
        "kvstore.tier",
    },
    "kvstore.postponed": {"kvstore.directory", "kvstore.tier"},
    "kvstore.gauge": {"kvstore.clock", "kvstore.rates", "kvstore.tier"},
    "kvstore.rates": set(),
    "kvstore.tier": {"kvstore.blocks", "kvstore.errors"},
    "kvstore.tiers": {
        "kvstore.blocks",
        "kvstore.clock",
        "kvstore.config",
        "kvstore.congestion",
        "kvstore.errors",
        "kvstore.log",
        "kvstore.policy",
        "kvstore.tier",
        "kvstore.tiers",
    },
    # A daemon that asks another one is its client.
    "kvstore.tiers.peer": {
        "kvstore.clock",
        "kvstore.congestion",
        "kvstore.endpoint",
        "kvstore.tier",
        "kvstore.tiers",
        "kvstore.wire.tls",
    },
    "kvstore.tiers.peer_link": {
        "kvstore.clock",
        "kvstore.data_link",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.log",
        "kvstore.threads",
        "kvstore.tier",
        "kvstore.tiers",
        "kvstore.wire",
    },
    "kvstore.namespaces": {"kvstore.blocks", "kvstore.directory", "kvstore.errors", "kvstore.log", "kvstore.tier"},
    "kvstore.watches": {
        "kvstore.directory",
        "kvstore.errors",
        "kvstore.journal",
        "kvstore.leases",
        "kvstore.tier",
    },
    "kvstore.hierarchy": {
        "kvstore.arena",
        "kvstore.arrivals",
        "kvstore.begun",
        "kvstore.blocks",
        "kvstore.clock",
        "kvstore.directory",
        "kvstore.errors",
        "kvstore.extents",
        "kvstore.leases",
        "kvstore.namespaces",
        "kvstore.outcomes",
        "kvstore.policy",
        "kvstore.pool",
        "kvstore.tier",
        "kvstore.transfers",
        "kvstore.watches",
    },
    "kvstore.listing": {"kvstore.blocks", "kvstore.hierarchy", "kvstore.tier"},
    "kvstore.prefetch": {"kvstore.blocks", "kvstore.directory", "kvstore.hierarchy", "kvstore.tier"},
    "kvstore.stats": {"kvstore.arena", "kvstore.hierarchy", "kvstore.pool"},
    "kvstore.wire": {"kvstore.blocks", "kvstore.endpoint", "kvstore.errors", "kvstore.wire"},
    "kvstore.calls": {"kvstore.errors", "kvstore.looking", "kvstore.wire"},
    "kvstore.data_wire": {"kvstore.blocks", "kvstore.errors"},
    "kvstore.data_link": {
        "kvstore.congestion",
        "kvstore.data_wire",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.threads",
    },
    "kvstore.staging": {"kvstore.arena", "kvstore.backing", "kvstore.errors"},
    "kvstore.remote": {
        "kvstore.arena",
        "kvstore.congestion",
        "kvstore.data_link",
        "kvstore.data_wire",
        "kvstore.errors",
        "kvstore.staging",
    },
    "kvstore.connection": {
        "kvstore.arena",
        "kvstore.blocks",
        "kvstore.calls",
        "kvstore.data_link",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.handoff",
        "kvstore.remote",
        "kvstore.staging",
        "kvstore.wire",
    },
    "kvstore.found": {"kvstore.arena", "kvstore.remote"},
    "kvstore.following": {"kvstore.arena", "kvstore.connection", "kvstore.wire"},
    # The two name each other's types; at run time only the client imports.
    "kvstore.insert": {
        "kvstore.blocks",
        "kvstore.client",
        "kvstore.engine_calls",
        "kvstore.errors",
        "kvstore.remote",
        "kvstore.threads",
    },
    "kvstore.engine_calls": {
        "kvstore.arena",
        "kvstore.blocks",
        "kvstore.connection",
        "kvstore.direct",
        "kvstore.errors",
        "kvstore.remote",
        "kvstore.wire",
    },
    "kvstore.client": {
        "kvstore.arena",
        "kvstore.blocks",
        "kvstore.congestion",
        "kvstore.connection",
        "kvstore.data_wire",
        "kvstore.endpoint",
        "kvstore.engine_calls",
        "kvstore.errors",
        "kvstore.following",
        "kvstore.found",
        "kvstore.insert",
        "kvstore.remote",
        "kvstore.wire",
    },
    "kvstore.tensors": {"kvstore.errors"},
    "kvstore.buffer": {
        "kvstore.arena",
        "kvstore.blocks",
        "kvstore.buffer",
        "kvstore.client",
        "kvstore.engine_calls",
        "kvstore.errors",
        "kvstore.following",
        "kvstore.insert",
        "kvstore.remote",
        "kvstore.tensors",
    },
    "kvstore.engine": {
        "kvstore.arena",
        "kvstore.blocks",
        "kvstore.client",
        "kvstore.engine",
        "kvstore.errors",
        "kvstore.found",
        "kvstore.insert",
        "kvstore.tensors",
        "kvstore.threads",
    },
    "kvstore.data_port": {
        "kvstore.arena",
        "kvstore.backing",
        "kvstore.congestion",
        "kvstore.data_wire",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.hierarchy",
        "kvstore.leases",
        "kvstore.log",
    },
    "kvstore.admin": {"kvstore.blocks", "kvstore.endpoint", "kvstore.errors", "kvstore.wire"},
    "kvstore.health": set(),
    "kvstore.metrics": {"kvstore.endpoint", "kvstore.errors", "kvstore.health"},
    "kvstore.render": {"kvstore.admin", "kvstore.health"},
    "kvstore.service": {
        "kvstore.begun",
        "kvstore.log",
        "kvstore.blocks",
        "kvstore.directory",
        "kvstore.errors",
        "kvstore.hierarchy",
        "kvstore.journal",
        "kvstore.leases",
        "kvstore.listing",
        "kvstore.pool",
        "kvstore.prefetch",
        "kvstore.tier",
        "kvstore.wire",
    },
    "kvstore.cli": {
        "kvstore",
        "kvstore.admin",
        "kvstore.cli_serve",
        "kvstore.config",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.health",
        "kvstore.metrics",
        "kvstore.render",
        "kvstore.secret",
        "kvstore.wire.tls",
    },
    "kvstore.cli_serve": {
        "kvstore.config",
        "kvstore.config_sources",
        "kvstore.daemon",
        "kvstore.log",
        "kvstore.tiers.redis_url",
    },
    "kvstore.cli_verify": {"kvstore.cli", "kvstore.errors", "kvstore.tiers.verify"},
    "kvstore.cli_router": {"kvstore.cli", "kvstore.config", "kvstore.errors", "kvstore.log", "kvstore.router"},
    "kvstore.router": {"kvstore.endpoint", "kvstore.errors", "kvstore.log", "kvstore.router"},
    "kvstore.__main__": {"kvstore.cli"},
    "engine_plugin.transformers": {"engine_plugin.transformers", "kvstore.engine", "kvstore.errors", "kvstore.insert"},
    "engine_plugin": {
        "engine_plugin",
        "kvstore",
        "kvstore.arena",
        "kvstore.blocks",
        "kvstore.client",
        "kvstore.congestion",
        "kvstore.direct",
        "kvstore.endpoint",
        "kvstore.errors",
        "kvstore.rates",
        "kvstore.remote",
        "kvstore.threads",
        "kvstore.wire.tls",
    },
}
#: The composition root may import anything of ours but these; so may what is shipped for tests, but for the last two.
ROOT_MAY_NOT = {
    "kvstore.cli",
    "kvstore.cli_router",
    "kvstore.cli_serve",
    "kvstore.cli_verify",
    "kvstore.router",
    "kvstore.testing",
    "engine_plugin",
}

#: Packages of others -> the only modules of ours that may import them.
OTHERS: dict[str, set[str]] = {
    "grpc": {
        "kvstore.calls",
        "kvstore.connection",
        "kvstore.daemon",
        "kvstore.service",
        "kvstore.tiers.peer_link",
        "kvstore.wire",
    },
    "torch": {"engine_plugin"},
    "transformers": {"engine_plugin.transformers"},
    "vllm": {"engine_plugin"},
    "lmdb": {"kvstore.tiers.disk_index"},
    "redis": {
        "kvstore.tiers.redis_calls",
        "kvstore.tiers.redis_server",
        "kvstore.tiers.redis_upkeep",
        "kvstore.tiers.redis_url",
        "kvstore.tiers.redis_wire",
    },
    "pydantic": {"kvstore.config", "kvstore.config_sources"},
    "click": {"kvstore.cli", "kvstore.cli_router", "kvstore.cli_serve", "kvstore.cli_verify"},
    "prometheus_client": {"kvstore.metrics", "kvstore.router.metrics"},
    "structlog": {"kvstore.log"},
    "aiohttp": {"kvstore.router.server", "kvstore.router.upstream"},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): path
    for folder in ("kvstore", "engine_plugin")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.parent != ROOT / "kvstore/wire/v1"
}


def imports_of(path: Path) -> set[str]:
    """Every module named in an import, wherever it stands. `from a import b` names a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return found


def within(name: str, tops: set[str]) -> bool:
    """Whether a name is one of these or below one. `kvstore` itself does not stand for all of it."""
    return any(name == top or (top != "kvstore" and name.startswith(f"{top}.")) for top in tops)


def rule_of(module: str) -> set[str] | None:
    """The narrowest rule that covers a module."""
    name = module
    while name:
        if name in LAYERS and (name != "kvstore" or module == "kvstore"):
            return LAYERS[name]
        name = name.rpartition(".")[0]
    return None


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    ours = {name for name in imports_of(MODULES[module]) if name.split(".")[0] in ("kvstore", "engine_plugin")}
    if module == "kvstore.daemon":
        assert not {name for name in ours if within(name, ROOT_MAY_NOT)}
        return
    if module.startswith("kvstore.testing"):
        assert not {name for name in ours if within(name, {"kvstore.cli", "kvstore.cli_serve", "engine_plugin"})}
        return
    rule = rule_of(module)
    assert rule is not None, f"{module} is not in the table of layers"
    assert not {name for name in ours if not within(name, rule)}


@pytest.mark.parametrize("module", MODULES)
def test_packages_of_others_stay_where_they_belong(module: str) -> None:
    for name in imports_of(MODULES[module]):
        package = name.split(".")[0]
        if package in OTHERS:
            assert within(module, OTHERS[package]), f"{module} imports {package}"


def test_the_table_names_no_module_that_is_gone() -> None:
    assert not {name for name in LAYERS if name not in MODULES}


def test_nothing_reads_pickles() -> None:
    for module, path in MODULES.items():
        assert not {"pickle", "marshal", "shelve", "dill"} & imports_of(path), module
