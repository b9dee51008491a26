"""An engine that is killed in the middle of a store leaves nothing behind, and nothing half stored."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.harness import BLOCK_TOKENS, FULL_BLOCKS, Daemon, Engine, prompt, wait_until


def test_engine_killed_in_mid_store(
    daemon: Daemon, engines: Callable[..., Engine], answers: Callable[[int], list[int]]
) -> None:
    extra = {"kvstore.endpoint": daemon.endpoint}
    victim = engines("victim", extra, max_num_batched_tokens=512)
    survivor = engines("survivor", extra)
    victim.ready()
    survivor.ready()
    survivor.generate(prompt(1000, 640))
    before = daemon.stored_blocks()
    # Steps of 512 tokens: eight stores for the prompt, one after another.
    victim.send(do="generate", prompts=[prompt(20)], max_tokens=1)

    def in_mid_store() -> bool:
        stats = daemon.stats()
        mine = [s for s in stats["sessions"] if s["pid"] == victim.process.pid]
        return stats["tiers"][0]["blocks"] > before and any(s["reserved_slots"] for s in mine)

    wait_until("the victim has stored a part and holds slots for more", in_mid_store, 60)
    victim.kill()

    def nothing_left() -> bool:
        stats = daemon.stats()
        gone = all(s["pid"] != victim.process.pid for s in stats["sessions"])
        mine = [s for s in stats["sessions"] if s["name"].startswith("vllm")]
        return gone and stats["pins"] == 0 and all(s["leases"] == 0 for s in mine)

    wait_until("pins and sessions of the victim are gone", nothing_left, 20)
    left = daemon.stats()
    others = sum(s["reserved_slots"] for s in left["sessions"])
    assert left["reserved_slots"] == others  # slots are held by living sessions only

    stored = daemon.stored_blocks() - before
    assert 0 < stored <= FULL_BLOCKS
    loaded = survivor.generate(prompt(20))[0]
    assert loaded["cached"] == min(stored, FULL_BLOCKS) * BLOCK_TOKENS
    assert loaded["tokens"] == answers(20)
    survivor.stop()
    wait_until("nothing is held when no engine is left", lambda: daemon.stats()["reserved_slots"] == 0, 20)
