"""KVTransfer against a real daemon: the right bytes in the right places, layer by layer, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore.engine import KVTensor, KVTransfer
from kvstore.engine.copying import LayerCopy
from kvstore.engine.layout import Layout
from kvstore.errors import ClientClosed, Damage, DeadlineExceeded, InvalidRequest, RetryLater, SizeMismatch
from kvstore.found import Found
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon

BLOCK = 16
#: Heads before tokens, tokens before heads, tokens last; three sizes of elements; a layer with one tensor only.
TENSORS = [
    [KVTensor("bfloat16", (1, 4, None, 32), 2), KVTensor("bfloat16", (1, 4, None, 32), 2)],
    [KVTensor("float32", (None, 3, 5), 4), KVTensor("float8_e4m3fn", (7, None), 1)],
    [KVTensor("int64", (None,), 8)],
]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def kv_of(tokens: Any, salt: int = 0) -> list[list[Any]]:
    """What a model would compute: the KV of a token depends on it and all before it."""
    state = np.cumsum(np.asarray(tokens, np.int64) * 7919 + 13 + salt)
    layers = []
    for index, layer in enumerate(TENSORS):
        row = []
        for number, tensor in enumerate(layer):
            shape = tensor.shape_of(len(state))
            others = np.arange(np.prod(shape) // max(1, len(state))).reshape(
                [1 if length is None else length for length in tensor.shape]
            )
            along = [len(state) if length is None else 1 for length in tensor.shape]
            values = (state.reshape(along) * (index + 1) + others * (number + 3)) & 0x7F
            row.append(values.astype(DTYPES.get(tensor.dtype, tensor.dtype)))
        layers.append(row)
    return layers


def same(loaded: Any, computed: Any, tokens: int) -> bool:
    """Whether the first tokens of all layers are byte for byte equal."""
    layout = Layout(TENSORS, BLOCK)
    return all(
        one.dtype == other.dtype and one.tobytes() == other.tobytes()
        for layer, wanted in zip(layout.cut(loaded, tokens), layout.cut(computed, tokens), strict=True)
        for one, other in zip(layer, wanted, strict=True)
    )


@pytest.fixture
def kv(served: Daemon) -> Iterator[KVTransfer]:
    with KVTransfer(TENSORS, model="engine", block_tokens=BLOCK, endpoint=served.endpoint) as kv:
        yield kv


def put(kv: KVTransfer, tokens: Any, **options: Any) -> int:
    result = kv.put(tokens, kv_of(tokens), **options).wait(PATIENCE_S)
    assert not result.refused
    return result.stored


def test_what_was_put_comes_back_whole_blocks_of_it(kv: KVTransfer) -> None:
    tokens = list(range(100, 100 + 5 * BLOCK + 3))
    assert kv.match(tokens) == 0
    assert put(kv, tokens) == 5
    assert kv.match(tokens) == 5 * BLOCK and kv.match(tokens[: 2 * BLOCK + 1]) == 2 * BLOCK
    load = kv.get(tokens)
    load.wait(PATIENCE_S)
    assert load.tokens == 5 * BLOCK and load.done and same(load.layers, kv_of(tokens), load.tokens)
    assert put(kv, tokens) == 0  # it is there


def test_prompts_share_the_blocks_of_their_beginning_and_no_others(kv: KVTransfer) -> None:
    one = np.arange(6 * BLOCK)
    other = one.copy()
    other[3 * BLOCK + 2] = 9999  # and all that follows has another past
    assert put(kv, one) == 6
    assert kv.match(other) == 3 * BLOCK
    assert put(kv, other) == 3
    for tokens in (one, other):
        load = kv.get(tokens)
        load.wait(PATIENCE_S)
        assert load.tokens == 6 * BLOCK and same(load.layers, kv_of(tokens), load.tokens)


def test_salts_and_identities_keep_prompts_apart(kv: KVTransfer, served: Daemon) -> None:
    tokens = list(range(2 * BLOCK))
    put(kv, tokens)
    put(kv, tokens[:BLOCK], salt="image-1")
    assert (kv.match(tokens, salt="image-1"), kv.match(tokens, salt="image-2")) == (BLOCK, 0)
    for other in ({"revision": "2"}, {"lora": "a"}, {"tenant": "t"}, {"extra": [("a", "b")]}, {"hash_name": "xxh3"}):
        options: Any = {"model": "engine", "block_tokens": BLOCK, "endpoint": served.endpoint, **other}
        with KVTransfer(TENSORS, **options) as stranger:
            assert stranger.match(tokens) == 0
            assert put(stranger, tokens) == 2
    with KVTransfer(TENSORS, model="engine", block_tokens=BLOCK, endpoint=served.endpoint) as equal:
        assert equal.match(tokens) == 2 * BLOCK


def test_keys_are_a_chain() -> None:
    with KVTransfer(TENSORS, model="m", block_tokens=4, endpoint="unix:/nowhere", attach_s=0) as kv:
        keys = kv.keys_of(list(range(12)))
        assert len(set(keys)) == 3 and kv.keys_of(np.arange(11, dtype=np.int32)) == keys[:2]
        assert kv.keys_of([9, *range(1, 12)])[2] != keys[2]
        assert kv.keys_of([]) == []
        with pytest.raises(InvalidRequest, match="token_ids"):
            kv.keys_of([[1, 2]])
        with pytest.raises(InvalidRequest, match="token_ids"):
            kv.keys_of([0.5] * 4)


def test_out_is_filled_in_place_whatever_its_strides(kv: KVTransfer) -> None:
    tokens = list(range(4 * BLOCK))
    put(kv, tokens)
    computed = kv_of(tokens)
    out = [[np.zeros((*array.shape, 2), array.dtype)[..., 0] for array in layer] for layer in computed]
    load = kv.get(tokens, out)
    load.wait(PATIENCE_S)
    assert same(out, computed, 4 * BLOCK)
    load = kv.get(tokens, Layout(TENSORS, BLOCK).empty(2 * BLOCK + 5, "numpy"))
    load.wait(PATIENCE_S)
    assert load.tokens == 2 * BLOCK and same(load.layers, computed, load.tokens)


def test_slots_in_any_order(kv: KVTransfer) -> None:
    """Blocks that were stored at different times, between others, and a store that fills the gaps."""
    tokens = np.arange(7 * BLOCK)
    for length in (1, 2, 4):
        put(kv, tokens[: length * BLOCK])
        put(kv, np.arange(BLOCK) + 1000 * length)
    keys = kv.keys_of(tokens)
    assert kv._client.delete([keys[1], keys[3]]) == 2
    assert put(kv, tokens) == 5
    load = kv.get(tokens)
    load.wait(PATIENCE_S)
    assert load.tokens == 7 * BLOCK and same(load.layers, kv_of(tokens), load.tokens)


class Gate:
    """Holds a load before it says that a layer is good, and decides what it then finds. A load of three layers asks
    four times: the end of its lease asks once more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.bad = False
        intact = Found.intact

        def held(found: Found) -> bool:
            if threading.current_thread().name.startswith("kvstore-engine-load"):
                self.at.release()
                assert self.go.acquire(timeout=PATIENCE_S)
                if self.bad:
                    return False
            return intact(found)

        monkeypatch.setattr(Found, "intact", held)


def test_layers_are_ready_one_after_the_other(kv: KVTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(3 * BLOCK))
    put(kv, tokens)
    gate = Gate(monkeypatch)
    load = kv.get(tokens)
    for index in range(3):
        assert gate.at.acquire(timeout=PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match="goes on"):
            load.wait_layer(index, 0)
        assert not load.done
        gate.go.release()
        load.wait_layer(index, PATIENCE_S)
        computed = kv_of(tokens)[index]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(load.layers[index], computed, strict=True))
    assert load.done
    gate.go.release()
    with pytest.raises(InvalidRequest, match="layer 3"):
        load.wait_layer(3)


def test_blocks_stay_while_they_are_loaded(kv: KVTransfer, served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(3 * BLOCK))
    put(kv, tokens)
    gate = Gate(monkeypatch)
    load = kv.get(tokens)
    assert gate.at.acquire(timeout=PATIENCE_S)
    with served.admin() as admin:
        admin.flush(None)
        admin.evict(64 << 20)
    assert kv.match(tokens) == 0
    for index in range(4000, 4040):  # others, into all the room there is
        put(kv, np.arange(BLOCK * 8) + index * 10)
    gate.go.release(4)
    load.wait(PATIENCE_S)
    assert same(load.layers, kv_of(tokens), load.tokens)


def test_bytes_that_changed_are_no_layer(kv: KVTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(3 * BLOCK))
    put(kv, tokens)
    gate = Gate(monkeypatch)
    load = kv.get(tokens)
    gate.go.release()
    load.wait_layer(0, PATIENCE_S)
    gate.bad = True
    gate.go.release(3)
    for index in (1, 2):
        with pytest.raises(Damage, match="compute the whole prompt"):
            load.wait_layer(index, PATIENCE_S)
    load.wait_layer(0)  # was checked before, and stays right
    assert load.done


def test_a_cancelled_load_leaves_the_tensors_alone(kv: KVTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(3 * BLOCK))
    put(kv, tokens)
    gate = Gate(monkeypatch)
    load, queued = kv.get(tokens), kv.get(tokens)
    assert gate.at.acquire(timeout=PATIENCE_S)
    cancelling = [threading.Thread(target=each.cancel) for each in (load, queued)]
    for thread in cancelling:
        thread.start()
    eventually(lambda: load._cancelled and queued._cancelled)
    gate.go.release()
    for thread in cancelling:
        thread.join(PATIENCE_S)
    with pytest.raises(DeadlineExceeded, match="cancelled"):
        load.wait(0)
    with pytest.raises(DeadlineExceeded, match="cancelled"):
        queued.wait_layer(0)
    kv.get([1]).cancel()


def test_a_defect_in_the_copy_ends_the_load(kv: KVTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(BLOCK))
    put(kv, tokens)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Layout, "load_pieces", broken)
    with pytest.raises(Damage, match="ZeroDivisionError"):
        kv.get(tokens).wait(PATIENCE_S)


def test_two_threads_share_a_large_load_layer_by_layer() -> None:
    """What one thread has left of a layer is waited for; what one fails at ends the load for both."""
    layers, each = 5, 6
    sources = np.arange(layers * each * 10).reshape(layers, each, 10)
    targets = np.zeros_like(sources)
    started, go = threading.Event(), threading.Event()

    def pieces_of(layer: int) -> Iterator[Any]:
        yield from zip(targets[layer], sources[layer], strict=True)

    class Slow(LayerCopy):
        def _copy(self, layer: int, piece: Any) -> None:
            if threading.current_thread() is helper and not started.is_set():
                started.set()
                assert go.wait(PATIENCE_S)
            super()._copy(layer, piece)

    copy = Slow(pieces_of, layers)
    helper = threading.Thread(target=copy.help)
    helper.start()
    assert started.wait(PATIENCE_S)  # with the first piece of the first layer in its hands
    waiting = threading.Thread(target=copy.copy, args=(0,))
    waiting.start()
    eventually(lambda: (targets[0, 1:] == sources[0, 1:]).all(), "the others of that layer are copied")
    assert waiting.is_alive() and not targets[0, 0].any()
    go.set()
    waiting.join(PATIENCE_S)
    for layer in range(layers):
        assert copy.copy(layer)
        assert (targets[layer] == sources[layer]).all()
    helper.join(PATIENCE_S)

    bad = LayerCopy(lambda layer: [(np.zeros(2), np.zeros(3))], 2)
    with pytest.raises(ValueError, match="broadcast"):
        bad.help()
    assert not bad.copy(0)


def test_a_prompt_that_two_threads_copy_comes_back_right(served: Daemon) -> None:
    tensor = KVTensor("float16", (2, None, 64), 2)
    tokens = np.arange(1500)
    computed = [[np.random.default_rng(index).random((2, 1500, 64)).astype(np.float16)] for index in range(16)]
    with KVTransfer([[tensor]] * 16, model="large", block_tokens=100, endpoint=served.endpoint) as kv:
        assert kv.put(tokens, computed).wait(PATIENCE_S).stored == 15
        for _ in range(3):
            load = kv.get(tokens)
            for index, (loaded,) in enumerate(load.layers):
                load.wait_layer(index, PATIENCE_S)
                assert np.array_equal(loaded, computed[index][0])


def test_a_daemon_that_is_away_costs_hits_only() -> None:
    tokens = list(range(4 * BLOCK))
    with running_daemon() as daemon:
        with KVTransfer(TENSORS, model="m", block_tokens=BLOCK, endpoint=daemon.endpoint) as kv:
            put(kv, tokens)
            load = kv.get(tokens)
            daemon.kill()
            try:
                load.wait(PATIENCE_S)
                assert same(load.layers, kv_of(tokens), load.tokens)
            except RetryLater:
                pass
            eventually(lambda: not kv.attached, "the client notices")
            assert kv.match(tokens) == 0
            load = kv.get(tokens)
            load.wait()
            assert load.tokens == 0 and load.done and load.layers[0][0].shape == (1, 4, 0, 32)
            result = kv.put(tokens, kv_of(tokens)).wait(PATIENCE_S)
            assert result.stored == 0 and sum(result.refused.values()) == 4
            daemon.start()
            eventually(lambda: kv.attached, "it attaches again")
            assert put(kv, tokens) == 4 and kv.match(tokens) == 4 * BLOCK


def test_what_rests_on_disk_comes_up(tmp_path: Path) -> None:
    tokens = list(range(40 * BLOCK))
    with running_daemon("--disk-dir", str(tmp_path), "--disk-bytes", "64MiB") as daemon:
        with KVTransfer(TENSORS, model="m", block_tokens=BLOCK, endpoint=daemon.endpoint) as kv:
            put(kv, tokens)
            with daemon.admin() as admin:
                eventually(lambda: admin.stats()["tiers"][1]["blocks"] == 40, "all are copied down")
                admin.evict(64 << 20)
                assert admin.stats()["tiers"][0]["blocks"] == 0
            assert kv.match(tokens) == 40 * BLOCK
            half = kv.get(tokens[: 20 * BLOCK])
            half.wait(PATIENCE_S)
            load = kv.get(tokens)  # one half is pinned at once, the other is waited for
            load.wait(PATIENCE_S)
            assert load.tokens == 40 * BLOCK and same(load.layers, kv_of(tokens), load.tokens)


def test_bad_input_is_named(kv: KVTransfer, served: Daemon) -> None:
    tokens = list(range(2 * BLOCK))
    good = kv_of(tokens)
    with pytest.raises(InvalidRequest, match="2 layers are given"):
        kv.put(tokens, good[:2])
    with pytest.raises(InvalidRequest, match="layer 1"):
        kv.put(tokens, [good[0], good[1][:1], good[2]])
    with pytest.raises(InvalidRequest, match=r"layer 2 is given int32\[32\] for int64"):
        kv.put(tokens, [*good[:2], [good[2][0].astype(np.int32)]])
    with pytest.raises(InvalidRequest, match="31 tokens"):
        kv.put(tokens, kv_of(tokens[:-1]))
    with pytest.raises(InvalidRequest, match="layer 0"):
        kv.get(tokens, [good[1], good[0], good[2]])
    options: Any = {"model": "engine", "endpoint": served.endpoint}
    for layers, block in (([], 16), ([[]], 16), (TENSORS, 0)):
        with pytest.raises(InvalidRequest, match=r"layers|block_tokens"):
            KVTransfer(layers, block_tokens=block, **options)
    with pytest.raises(InvalidRequest, match="sha256, xxh3"):
        KVTransfer(TENSORS, hash_name="md5", **options)  # type: ignore[arg-type]
    for shape in ((1, 2), (None, None), (None, 0)):
        with pytest.raises(InvalidRequest, match="shape"):
            KVTensor("int8", shape, 1)
    with pytest.raises(InvalidRequest, match="item_bytes"):
        KVTensor("int8", (None,), 3)


def test_another_block_size_under_the_same_identity_is_refused(served: Daemon) -> None:
    """Shapes and dtypes are part of the identity; only the sizes of elements could differ behind them."""
    options: Any = {"model": "sizes", "block_tokens": 4, "endpoint": served.endpoint}
    with KVTransfer([[KVTensor("float", (None, 64), 4)]], **options):
        with pytest.raises(SizeMismatch):
            KVTransfer([[KVTensor("float", (None, 64), 8)]], **options)


def test_after_close(served: Daemon) -> None:
    kv = KVTransfer(TENSORS, model="engine", block_tokens=BLOCK, endpoint=served.endpoint)
    tokens = list(range(BLOCK))
    put(kv, tokens)
    kv.close()
    kv.close()
    with pytest.raises(ClientClosed):
        kv.put(tokens, kv_of(tokens))
    with pytest.raises(ClientClosed):
        kv.get(tokens)
