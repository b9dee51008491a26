"""Stats, sessions and blocks as tables for people. Programs read `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvstore.admin import ListedBlock
from kvstore.health import HEALTHY

Stats = Mapping[str, Any]

#: Columns in a pipe, where there is no terminal to ask. Wide enough that no cell is cut.
PIPE_COLUMNS: Final = 240


def console_for(stream: TextIO) -> Console:
    """A console that fits a terminal and neither folds nor colours lines in a pipe."""
    return Console(
        file=stream, highlight=False, markup=False, emoji=False, width=None if stream.isatty() else PIPE_COLUMNS
    )


def stats_view(stats: Stats, before: Stats | None = None) -> RenderableType:
    """Everything in the stats tree, as one page.

    Args:
        stats: The tree.
        before: An earlier tree; with it, rates over the time between are shown. One of another generation is ignored,
            since its counters started elsewhere.
    """
    parts: list[RenderableType] = [_headline(stats), _tiers(stats["tiers"])]
    for tier in stats["tiers"]:
        if tier.get("classes"):
            parts.append(_classes(tier))
    if stats["namespaces"]:
        parts.append(_namespaces(stats["namespaces"]))
    if stats["sessions"]:
        parts.append(sessions_view(stats["sessions"]))
    parts.append(_counts(stats))
    if before is not None and before["generation"] == stats["generation"]:
        rates = _rates(stats, before)
        if rates is not None:
            parts.append(rates)
    return Group(*parts)


def sessions_view(sessions: Iterable[Mapping[str, Any]]) -> RenderableType:
    """One line a session."""
    table = _table(
        ["session", "name", "group", "state", "mapped"],
        ["pid", "leases", "pins", "reserved", "age", "share", "of it used"],
    )
    for session in sessions:
        share = session["share_bytes"]
        _row(
            table,
            session["id"][:12],
            session["name"] or "-",
            session["group"] or "-",
            session["state"],
            "yes" if session["mapped"] else "no",
            str(session["pid"]),
            str(session["leases"]),
            str(session["pins"]),
            str(session["reserved_slots"]),
            f"{session['age_s']:.0f} s",
            decimal(share) if share else "-",
            decimal(session["share_used_bytes"]) if share else "-",
        )
    return _titled("sessions", table)


def blocks_view(blocks: Sequence[ListedBlock], total: int) -> RenderableType:
    """One line a block, and how many were not listed."""
    table = _table(["namespace", "key", "tiers"], ["group", "size", "pins"])
    for block in blocks:
        _row(
            table,
            block.namespace.hex(),
            block.key.hex(),
            " ".join(block.tiers),
            str(block.group),
            decimal(block.size_bytes),
            str(block.pins),
        )
    return Group(table, Text(f"{len(blocks)} of {total} blocks"))


def _table(words: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for word in words:
        table.add_column(word, overflow="fold")
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def _titled(title: str, table: Table) -> RenderableType:
    # Not the table's own title, which is folded at the table's width.
    return Group(Text(title, style="bold underline"), table, Text(""))


def _row(table: Table, *cells: str | Text) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in cells))


def printable(text: str) -> str:
    """Names come from clients: what would move the cursor or change colours is shown as its escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _headline(stats: Stats) -> Text:
    return Text(
        f"kvstore {stats['version']}, pid {stats['pid']}, {stats['state']}, up {stats['uptime_s']:.0f} s, "
        f"generation {stats['generation'][:12]}, block size {stats['block_size']} tokens, "
        f"listening at {' '.join(stats['listen'])}\n"
    )


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = _table(
        ["tier", "state", "pages"],
        ["capacity", "used", "free", "populated", "overhead", "waste", "blocks", "evictions"],
    )
    for tier in tiers:
        backing = tier.get("backing")
        pages = "-"
        if backing is not None:
            pages = f"{backing['kind']} ({decimal(backing['huge_bytes'])} huge)"
            if backing["note"]:
                pages += f": {backing['note']}"
        _row(
            table,
            tier["name"],
            Text(tier["state"], style="" if tier["state"] in HEALTHY else "bold red"),
            pages,
            *(
                decimal(tier[key]) if key in tier else "-"
                for key in ("capacity_bytes", "used_bytes", "free_bytes", "populated_bytes")
            ),
            *(decimal(tier[key]) if key in tier else "-" for key in ("overhead_bytes", "waste_bytes")),
            str(tier["blocks"]),
            str(tier.get("evictions", "-")),
        )
    return _titled(f"tiers, in the order of copy-down: {' -> '.join(tier['name'] for tier in tiers)}", table)


def _classes(tier: Mapping[str, Any]) -> RenderableType:
    if "slot_bytes" not in tier["classes"][0]:
        return _extents(tier)
    table = _table([], ["slot", "segments", "slots", "used", "reserved"])
    for size_class in tier["classes"]:
        _row(
            table,
            decimal(size_class["slot_bytes"]),
            *(str(size_class[key]) for key in ("segments", "slots", "used_slots", "reserved_slots")),
        )
    return _titled(
        f"slots of tier {tier['name']} ({tier['segments']} segments, {tier['segment_moves']} moves between sizes)",
        table,
    )


def _extents(tier: Mapping[str, Any]) -> RenderableType:
    """A disk's classes."""
    table = _table([], ["extent", "slabs", "extents", "used", "retired"])
    for size_class in tier["classes"]:
        _row(
            table,
            decimal(size_class["extent_bytes"]),
            *(str(size_class[key]) for key in ("slabs", "extents", "used_extents", "retired_extents")),
        )
    return _titled(f"extents of tier {tier['name']}", table)


def _namespaces(namespaces: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = _table(["digest", "identity"], ["group", "block", "blocks", "bytes"])
    for namespace in namespaces:
        identity = " ".join(f"{name}={_plain(value)}" for name, value in namespace["identity"].items() if value)
        for group in namespace["groups"]:
            first = group is namespace["groups"][0]
            _row(
                table,
                namespace["digest"] if first else "",
                identity if first else "",
                str(group["group"]),
                decimal(group["block_bytes"]),
                str(group["blocks"]),
                decimal(group["bytes"]),
            )
    return _titled("namespaces", table)


def _plain(value: object) -> str:
    """A field of an identity. Layer names run to hundreds, so a list shows its ends."""
    if isinstance(value, list):
        inner = [_plain(part) for part in value]
        return f"[{', '.join(inner)}]" if len(inner) <= 3 else f"[{inner[0]} ... {inner[-1]} ({len(inner)})]"
    return str(value)


def _counts(stats: Stats) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    _row(
        table,
        "held now",
        f"{stats['pins']} pins in {stats['leases']} leases, {stats['reserved_slots']} reserved slots, "
        f"{stats['waiters']} waiting calls",
    )
    for key in ("hits", "misses", "stores", "refused", "removed", "transfers", "calls", "errors"):
        _row(table, key, ", ".join(f"{name} {value}" for name, value in stats[key].items()) or "none")
    _row(table, "bytes", ", ".join(f"{name} {decimal(value)}" for name, value in stats["bytes"].items()))
    for tier, directions in stats["moved"].items():
        _row(table, f"{tier} copies", ", ".join(f"{name} {_moved(figures)}" for name, figures in directions.items()))
    return table


def _moved(figures: Mapping[str, Any]) -> str:
    batches = figures["batches"]
    if not batches:
        return "nothing"
    return f"{decimal(figures['bytes'])} in {batches} batches of {figures['seconds'] / batches * 1000:.1f} ms"


def _rates(stats: Stats, before: Stats) -> Table | None:
    """Figures per second between two trees of one daemon; None where no time went by."""
    seconds = stats["uptime_s"] - before["uptime_s"]
    if seconds <= 0:
        return None
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    moved = ", ".join(
        f"{name} {decimal(int(max(0, value - before['bytes'].get(name, 0)) / seconds))}/s"
        for name, value in stats["bytes"].items()
    )
    totals = ", ".join(
        f"{key} {max(0, sum(stats[key].values()) - sum(before[key].values())) / seconds:.0f}/s"
        for key in ("hits", "misses", "stores", "calls")
    )
    _row(table, "rates", f"{moved}, {totals}")
    return table
