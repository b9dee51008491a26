"""PrefixCache with a real, tiny Llama: the logits are those of a model without it, whatever happens."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_plugin.transformers import LoadingLayer, PrefixCache  # noqa: E402
from kvstore.errors import Damage, InvalidRequest  # noqa: E402
from kvstore.found import Found  # noqa: E402
from tests.support import PATIENCE_S, Daemon, eventually, running_daemon  # noqa: E402

BLOCK, LAYERS, VOCABULARY = 8, 4, 96


def llama(seed: int = 0, dtype: Any = torch.float32, **changes: Any) -> Any:
    """A model with random weights, made from a configuration."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": None,
            "pad_token_id": 0,
            **changes,
        }
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def prefixes(served: Daemon, model: Any) -> Iterator[PrefixCache]:
    with PrefixCache(model, endpoint=served.endpoint, block_tokens=BLOCK) as prefixes:
        yield prefixes


def prompt(seed: int, length: int) -> Any:
    return torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def split_logits(model: Any, ids: Any, cached: int) -> Any:
    """Logits of what follows the first `cached` tokens, whose KV the same model computed in memory, in one pass."""
    if not cached:
        return model(input_ids=ids).logits
    cache = model(input_ids=ids[:, :cached], use_cache=True).past_key_values
    return model(input_ids=ids[:, cached:], past_key_values=cache).logits


def store(prefixes: PrefixCache, ids: Any) -> None:
    cache = prefixes._model(input_ids=ids, use_cache=True).past_key_values
    assert not prefixes.save(ids, cache).wait(PATIENCE_S).refused


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 3])
def test_logits_are_identical_with_any_tail(prefixes: PrefixCache, model: Any, length: int) -> None:
    ids = prompt(length, length)
    first = prefixes.prefill(ids)
    assert torch.equal(first.logits, model(input_ids=ids).logits)
    eventually(lambda: prefixes.match(ids) == length // BLOCK * BLOCK, "it was saved")
    again = prefixes.prefill(ids)
    cached = (length - 1) // BLOCK * BLOCK  # the last token is always computed
    assert again.logits.shape[1] == length - cached
    assert torch.equal(again.logits, split_logits(model, ids, cached))
    assert torch.allclose(again.logits, first.logits[:, cached:], atol=1e-5)
    for layer, wanted in zip(again.past_key_values.layers, first.past_key_values.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :cached], wanted.keys[:, :, :cached])
        assert torch.equal(layer.values[:, :, :cached], wanted.values[:, :, :cached])


def test_a_partial_prefix_is_loaded_and_the_rest_computed(prefixes: PrefixCache, model: Any) -> None:
    known = prompt(1, 6 * BLOCK)
    store(prefixes, known)
    ids = torch.cat([known[:, : 3 * BLOCK + 5], prompt(2, 2 * BLOCK)], dim=1)
    assert prefixes.match(ids) == 3 * BLOCK
    output = prefixes.prefill(ids)
    assert torch.equal(output.logits, split_logits(model, ids, 3 * BLOCK))
    eventually(lambda: prefixes.match(ids) == ids.shape[1] // BLOCK * BLOCK, "the rest was saved")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_generation_gives_the_same_tokens_and_saves_the_answer(served: Daemon, dtype: Any) -> None:
    model, ids = llama(dtype=dtype), prompt(3, 5 * BLOCK + 2)
    greedy: Any = {"max_new_tokens": 2 * BLOCK, "do_sample": False}
    plain = model.generate(ids, **greedy)
    with PrefixCache(model, endpoint=served.endpoint, block_tokens=BLOCK) as prefixes:
        assert torch.equal(prefixes.generate(ids, **greedy), plain)
        eventually(lambda: prefixes.match(plain) == 7 * BLOCK, "prompt and answer were saved")
        detailed = prefixes.generate(ids, return_dict_in_generate=True, output_logits=True, **greedy)
        assert torch.equal(detailed.sequences, plain)
        cache = model(input_ids=ids[:, : 5 * BLOCK], use_cache=True).past_key_values
        wanted = model.generate(
            ids, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **greedy
        ).logits
        assert all(torch.equal(one, other) for one, other in zip(detailed.logits, wanted, strict=True))
        # The next turn of the conversation begins with the answer.
        turn = torch.cat([plain, prompt(4, 3)], dim=1)
        assert torch.equal(prefixes.generate(turn, **greedy), model.generate(turn, **greedy))


def test_the_example_of_the_document(served: Daemon, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ENDPOINT", served.endpoint)
    text = (Path(__file__).parents[2] / "docs/buffer.md").read_text()
    (example,) = re.findall(r"```\n(from engine_plugin.transformers .*?)```", text, re.DOTALL)
    names: Any = {"model": model, "input_ids": prompt(10, 2 * 64 + 1)}
    # What its first line saves may still be on its way when its second one looks: it is there before.
    with PrefixCache(model) as prefixes:
        cache = prefixes.prefill(names["input_ids"]).past_key_values
        prefixes.save(names["input_ids"], cache).wait(PATIENCE_S)
    exec(compile(example, "docs/buffer.md", "exec"), names)
    assert names["output"].logits.shape[:2] == (1, 1) and names["cache"].get_seq_length() == 128


class Gate:
    """Holds the thread that loads, before it says that a layer is good."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Semaphore(0)
        self.bad = False
        intact = Found.intact

        def held(found: Found) -> bool:
            if threading.current_thread().name.startswith("kvstore-engine-load"):
                assert self.go.acquire(timeout=PATIENCE_S)
                if self.bad:
                    return False
            return intact(found)

        monkeypatch.setattr(Found, "intact", held)


def test_first_layers_compute_while_the_last_ones_load(
    prefixes: PrefixCache, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(5, 4 * BLOCK + 1)
    store(prefixes, ids)
    wanted = split_logits(model, ids, 4 * BLOCK)
    gate = Gate(monkeypatch)
    computed = [threading.Event() for _ in range(LAYERS)]
    hooks = [
        layer.register_forward_hook(lambda *_, done=done: done.set())
        for layer, done in zip(model.model.layers, computed, strict=True)
    ]
    cache = prefixes.restore(ids)
    assert all(type(layer) is LoadingLayer for layer in cache.layers)
    assert cache.get_seq_length() == 4 * BLOCK  # known before anything came
    outputs: list[Any] = []

    def run() -> None:
        with torch.inference_mode():
            outputs.append(model(input_ids=ids[:, 4 * BLOCK :], past_key_values=cache).logits)

    thread = threading.Thread(target=run)
    thread.start()
    for index, done in enumerate(computed):
        assert not done.is_set()
        assert not cache.layers[-1]._load.done
        gate.go.release()
        assert done.wait(PATIENCE_S)  # this layer is through the model, and the next one is not in the cache
        assert not any(later.is_set() for later in computed[index + 1 :])
    gate.go.release()
    thread.join(PATIENCE_S)
    for hook in hooks:
        hook.remove()
    assert torch.equal(outputs[0], wanted)


@pytest.mark.parametrize("good_layers", [0, 1, LAYERS - 1])
def test_a_load_that_fails_half_way_is_computed_again(
    prefixes: PrefixCache, model: Any, monkeypatch: pytest.MonkeyPatch, good_layers: int
) -> None:
    ids = prompt(6, 4 * BLOCK + 1)
    store(prefixes, ids)
    wanted, greedy = model(input_ids=ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    gate = Gate(monkeypatch)
    begun = threading.Event()
    advance = LoadingLayer._wait

    def wait(layer: LoadingLayer) -> None:
        """The first layers come before the damage is done."""
        if not begun.is_set():
            begun.set()
            for _ in range(good_layers):
                gate.go.release()
            if good_layers:
                layer._load.wait_layer(good_layers - 1, PATIENCE_S)  # type: ignore[union-attr]
            gate.bad = True
            gate.go.release(2)
        advance(layer)

    monkeypatch.setattr(LoadingLayer, "_wait", wait)
    assert torch.equal(prefixes.prefill(ids).logits, wanted)
    begun.clear()
    gate.bad = False
    while gate.go.acquire(blocking=False):
        pass
    assert torch.equal(prefixes.generate(ids, max_new_tokens=4, do_sample=False), greedy)
    begun.clear()
    gate.bad = False
    while gate.go.acquire(blocking=False):
        pass
    cache = prefixes.restore(ids)
    with pytest.raises(Damage):
        model(input_ids=ids[:, 4 * BLOCK :], past_key_values=cache)


def test_a_daemon_that_is_gone_costs_time_only(model: Any) -> None:
    ids = prompt(7, 4 * BLOCK + 3)
    wanted = model(input_ids=ids).logits
    with running_daemon() as daemon, PrefixCache(model, endpoint=daemon.endpoint, block_tokens=BLOCK) as prefixes:
        store(prefixes, ids)
        cache = prefixes.restore(ids)
        assert cache.get_seq_length() == 4 * BLOCK
        daemon.kill()
        eventually(lambda: not prefixes._kv.attached, "the client notices")
        assert torch.equal(prefixes.prefill(ids).logits, wanted)
        daemon.start()
        eventually(lambda: prefixes._kv.attached, "it attaches again")
        prefixes.prefill(ids)
        eventually(lambda: prefixes.match(ids) == 4 * BLOCK, "it is saved again")


def test_a_daemon_that_never_was(model: Any) -> None:
    ids = prompt(8, 2 * BLOCK)
    with PrefixCache(model, endpoint="unix:/nowhere/at/all", attach_s=0) as prefixes:
        assert torch.equal(prefixes.prefill(ids).logits, model(input_ids=ids).logits)


def test_another_process_finds_it_and_other_models_do_not(prefixes: PrefixCache, served: Daemon, model: Any) -> None:
    ids = prompt(9, 4 * BLOCK)
    store(prefixes, ids)
    options: Any = {"endpoint": served.endpoint, "block_tokens": BLOCK}
    with PrefixCache(llama(), **options) as equal:  # the same seed gives the same weights
        assert equal.match(ids) == 4 * BLOCK
        assert equal.match(ids, salt="somebody") == 0
    others = [llama(seed=1), llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}), llama()]
    others[-1].model.layers[2].self_attn.k_proj.weight.data += 0.5  # merged into it
    for other in others:
        with PrefixCache(other, **options) as stranger:
            assert stranger.match(ids) == 0


def test_what_cannot_be_restored_is_refused(prefixes: PrefixCache, served: Daemon) -> None:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    with pytest.raises(InvalidRequest, match="SlidingWindow"):
        PrefixCache(transformers.MistralForCausalLM(config).eval(), endpoint=served.endpoint)
    for ids in (prompt(1, 8)[0], torch.cat([prompt(1, 8)] * 2), prompt(1, 8)[:, :0]):
        with pytest.raises(InvalidRequest, match="one prompt"):
            prefixes.restore(ids)
    with torch.device("meta"):
        nowhere = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    with pytest.raises(InvalidRequest, match="host memory"):
        PrefixCache(nowhere, endpoint=served.endpoint)
