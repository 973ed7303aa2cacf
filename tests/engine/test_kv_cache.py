# SPDX-License-Identifier: Apache-2.0
"""The block pool and the prefix search beside brute-force twins."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.paged_oracle import FULL, SLIDING, conv, make_request
from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.kv_cache import BlockPool, KVCacheManager
from vllm.engine.request import Request

BLOCK = 4
SLIDING_LONG = SLIDING.__class__("sliding", SLIDING.layers, window=15)


class PoolTwin:
    """The same pool with plain lists: slow, and plainly right."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.content: dict[int, bytes] = {}

    def allocate(self, count: int) -> list[int]:
        taken = [self.free.pop(0) for _ in range(count)]
        for block in taken:
            self.content.pop(block, None)
            self.refs[block] = 1
        return taken

    def hold(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        self.refs[block] += 1

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free.insert(len(self.free) if block in self.content else 0, block)

    def publish(self, block: int, content: bytes) -> None:
        if block not in self.content and content not in self.content.values():
            self.content[block] = content

    def lookup(self, content: bytes) -> int:
        return next((b for b, c in self.content.items() if c == content), 0)


@settings(max_examples=200, deadline=None)
@given(
    num_blocks=st.integers(2, 12),
    operations=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=60),
)
def test_the_pool_does_what_its_twin_does(num_blocks, operations):
    pool, twin = BlockPool(num_blocks), PoolTwin(num_blocks)
    for kind, number in operations:
        held = [b for b, refs in twin.refs.items() if refs > 0]
        content = bytes([number % 6])
        if kind == 0:
            count = number % (len(twin.free) + 1)
            assert pool.allocate(count) == twin.allocate(count)
        elif kind == 1 and held:
            block = held[number % len(held)]
            pool.release([block, 0])
            twin.release(block)
        elif kind == 2 and held:
            block = held[number % len(held)]
            pool.publish(block, content)
            twin.publish(block, content)
        elif kind == 3 and twin.lookup(content):
            pool.hold([0, pool.lookup(content)])
            twin.hold(twin.lookup(content))
        elif kind == 4 and number < 5:
            pool.withdraw_all()
            twin.content.clear()
        assert pool.num_free == len(twin.free)
        assert all(pool.is_free(b) == (b in twin.free) for b in twin.refs)
        assert pool.usage == 1 - len(twin.free) / (num_blocks - 1)
        for value in range(6):
            assert pool.lookup(bytes([value])) == twin.lookup(bytes([value]))


def longest_valid_prefix(manager: KVCacheManager, request: Request) -> int:
    """By definition: try every length and every block that it would read."""
    hashes = request.block_hashes
    for count in range((len(request.token_ids) - 1) // BLOCK, 0, -1):
        length = count * BLOCK
        for group, pool in zip(manager.groups, manager.pools, strict=True):
            reach = length if group.window is None else group.window - 1
            positions = range(max(0, length - reach), length)
            if not all(pool.lookup(hashes[p // BLOCK]) for p in positions):
                break
        else:
            return length
    return 0


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(
        st.sampled_from([FULL, SLIDING, SLIDING_LONG, conv(4, BLOCK), conv(2, BLOCK)]),
        min_size=1,
        max_size=4,
    ),
    length=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_a_hit_is_the_longest_prefix_that_every_group_can_continue(groups, length, seed):
    rng = random.Random(seed)
    manager = KVCacheManager(KVCacheConfig(BLOCK, tuple(groups), (64,) * len(groups)), True)
    prompt = [rng.randrange(50) for _ in range(length)]
    request = Request(make_request("r", prompt), 1000)
    assert manager.find_prefix(request)[0] == 0
    for pool in manager.pools:
        for block_hash in request.block_hashes:
            if rng.random() < 0.85:
                (block,) = pool.allocate(1)
                pool.publish(block, block_hash)
    num_cached, tables = manager.find_prefix(request)
    assert num_cached == longest_valid_prefix(manager, request)
    for group, pool, table in zip(manager.groups, manager.pools, tables, strict=True):
        first = group.first_needed_block(num_cached, BLOCK) if num_cached else 0
        hashes = request.block_hashes[: num_cached // BLOCK]
        assert table == [0] * first + [pool.lookup(h) for h in hashes[first:]]


def test_a_hash_names_the_whole_beginning_and_not_only_the_block():
    manager = KVCacheManager(KVCacheConfig(BLOCK, (FULL,), (8,)), True)
    hashes = set()
    for prompt in ([1] * 8, [2] * 4 + [1] * 4, [1] * 4 + [2] * 4, [1, 1, 1, 2] * 2):
        request = Request(make_request("r", [*prompt, 9]), 100)
        manager.find_prefix(request)
        hashes.update(request.block_hashes)
    assert len(hashes) == 7  # the first and the third share their first block


def test_token_ids_of_any_size_are_hashed_apart():
    manager = KVCacheManager(KVCacheConfig(BLOCK, (FULL,), (8,)), True)
    hashes = []
    for token in (1, 1 + 2**16, 1 + 2**32):
        request = Request(make_request("r", [token] * 5), 100)
        manager.find_prefix(request)
        hashes += request.block_hashes
    assert len(set(hashes)) == 3
