"""LruPolicy against an OrderedDict, which is what it should be but for its cost."""

from __future__ import annotations

import random
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore import policy as policy_module
from kvstore.policy import LruPolicy, Ticker


class Node:
    def __init__(self, name: int) -> None:
        self.name = name
        self.tick = 0

    def __repr__(self) -> str:
        return f"Node({self.name})"


class Oracle:
    """Least recently used first."""

    def __init__(self) -> None:
        self.order: OrderedDict[Node, None] = OrderedDict()

    def touch(self, chain: list[Node]) -> None:
        for node in reversed(chain):
            self.order[node] = None
            self.order.move_to_end(node)

    def forget(self, node: Node) -> None:
        self.order.pop(node, None)

    def pop(self) -> Node | None:
        return self.order.popitem(last=False)[0] if self.order else None


def check(policy: LruPolicy[Node], oracle: Oracle, nodes: list[Node]) -> None:
    assert len(policy) == len(oracle.order)
    assert {node for node in nodes if node.tick} == set(oracle.order)
    assert (policy.oldest_age() is None) == (not oracle.order)


STEP = st.one_of(
    st.tuples(st.just("touch"), st.lists(st.integers(0, 19), max_size=8)),
    st.tuples(st.just("forget"), st.lists(st.integers(0, 19), max_size=2)),
    st.tuples(st.just("pop"), st.just([])),
)


@pytest.mark.parametrize("chunk", [1, 3, 4096])
@given(steps=st.lists(STEP, max_size=60))
@settings(max_examples=150, deadline=None, database=None)
def test_it_is_an_lru(chunk: int, steps: list[tuple[str, list[int]]]) -> None:
    """Also with chunks so small that sorting out and sweeping happen at every turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "_CHUNK", chunk)
        nodes = [Node(name) for name in range(20)]
        policy, oracle = LruPolicy[Node](), Oracle()
        for what, names in steps:
            chain = [nodes[name] for name in names]
            if what == "touch":
                policy.touch(chain)
                oracle.touch(chain)
            elif what == "forget":
                for node in chain:
                    policy.forget(node)
                    oracle.forget(node)
            else:
                assert policy.pop() is oracle.pop()
            check(policy, oracle, nodes)
        while oracle.order:
            assert policy.peek(1)[:1] in ([], [next(iter(oracle.order))])
            assert policy.pop() is oracle.pop()
        assert policy.pop() is None


def test_it_is_an_lru_over_a_long_time_and_its_log_stays_short() -> None:
    chance = random.Random(7)
    nodes = [Node(name) for name in range(3000)]
    policy, oracle = LruPolicy[Node](), Oracle()
    for _ in range(3000):
        start = int(chance.random() ** 2 * 2900)
        chain = nodes[start : start + chance.randrange(1, 100)]
        policy.touch(chain)
        oracle.touch(chain)
        for _ in range(chance.randrange(20)):
            assert policy.pop() is oracle.pop()
        assert policy._references <= 3 * len(policy) + 4 * 4096
    while oracle.order:
        assert policy.pop() is oracle.pop()
    assert policy.pop() is None and policy._references < 4096


def test_a_chain_leaves_from_its_end() -> None:
    policy = LruPolicy[Node]()
    chain = [Node(name) for name in range(5)]
    policy.touch(chain)
    policy.touch(chain[:2])
    assert [policy.pop() for _ in chain] == [chain[4], chain[3], chain[2], chain[1], chain[0]]


def test_a_node_that_occurs_twice_counts_once() -> None:
    policy = LruPolicy[Node]()
    node, other = Node(0), Node(1)
    policy.touch([node, other, node])
    assert len(policy) == 2
    assert [policy.pop(), policy.pop(), policy.pop()] == [other, node, None]


def test_ages_of_several_policies_can_be_compared() -> None:
    """To within a chunk: the policy whose nodes were all touched a chunk earlier is the older one, at any time."""
    ticker = Ticker()
    early, late = LruPolicy[Node](ticker), LruPolicy[Node](ticker)
    early.touch([Node(name) for name in range(10)])
    for _ in range(3):
        late.touch([Node(name) for name in range(4096)])
    first, second = early.oldest_age(), late.oldest_age()
    assert first is not None and second is not None and first < second
    early_nodes = early.peek(100)
    early.touch(early_nodes)
    while late.pop():
        pass
    late.touch([Node(-1)] * 5000)
    assert len(early) == 10 and len(late) == 1


def test_what_was_forgotten_can_come_back() -> None:
    policy = LruPolicy[Node]()
    node, other = Node(0), Node(1)
    policy.touch([node])
    policy.forget(node)
    policy.forget(node)
    assert len(policy) == 0 and policy.oldest_age() is None and policy.pop() is None
    policy.touch([other])
    policy.touch([node])
    assert [policy.pop(), policy.pop()] == [other, node]
