"""Memory of a client on another host: places, and what they cost each other."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.errors import LimitExceeded
from kvstore.staging import Staging

PAGE = 4096


def test_places_do_not_overlap_and_come_back() -> None:
    random = np.random.default_rng(1)
    staging = Staging(64 * PAGE)
    held: dict[int, tuple[int, int]] = {}
    for _ in range(2000):
        if held and random.random() < 0.5:
            offset = int(random.choice(list(held)))
            size, epoch = held.pop(offset)
            staging.give_back([offset], [epoch])
            staging.give_back([offset], [epoch])  # twice is once
        else:
            size = int(random.integers(1, 6 * PAGE))
            offsets, epochs = staging.take(1, size)
            for offset, epoch in zip(offsets.tolist(), epochs.tolist(), strict=True):
                end = offset + size
                assert end <= staging.size_bytes
                assert all(end <= other or other + length <= offset for other, (length, _) in held.items())
                held[offset] = (size, epoch)
        assert staging.used_bytes == sum(-(-size // PAGE) * PAGE for size, _ in held.values())
    for offset, (_, epoch) in held.items():
        staging.give_back([offset], [epoch])
    assert len(staging.take(64, PAGE)[0]) == 64 == staging.capacity(PAGE)


def test_a_place_that_was_handed_out_anew_is_not_given_back_by_its_old_name() -> None:
    staging = Staging(PAGE)
    offsets, epochs = staging.take(1, 1)
    staging.give_back(offsets.tolist(), epochs.tolist())
    again, newer = staging.take(1, 1)
    assert again.tolist() == offsets.tolist() and newer.tolist() != epochs.tolist()
    staging.give_back(offsets.tolist(), epochs.tolist())
    assert staging.used_bytes == PAGE


def test_what_can_never_fit_is_refused_and_what_may_waits() -> None:
    staging = Staging(4 * PAGE)
    with pytest.raises(LimitExceeded, match="staging_bytes"):
        staging.take(5, PAGE)
    offsets, epochs = staging.take(3, PAGE)
    assert len(staging.take(2, PAGE)[0]) == 1
    threading.Timer(0.01, staging.give_back, (offsets.tolist(), epochs.tolist())).start()
    assert len(staging.take(3, PAGE, wait_s=60)[0]) == 3


def test_views_are_the_places() -> None:
    staging = Staging(4 * PAGE)
    offsets, _ = staging.take(2, 100)
    first, second = staging.views(offsets.tolist(), 100)
    first[:], second[:] = b"a" * 100, b"b" * 100
    whole = staging.as_numpy()
    assert [whole[offset] for offset in offsets.tolist()] == [ord("a"), ord("b")]
