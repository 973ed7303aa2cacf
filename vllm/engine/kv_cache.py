# SPDX-License-Identifier: Apache-2.0
"""KV cache blocks: one pool a group, block tables, and the prefix cache over them.

A block is *held* (reference count above 0), or free. A free block may still be
*published*: its content is known by a hash over all tokens up to its end, and a new
request with the same beginning takes it back. Free blocks are reused from the least
recently freed, so the published ones last longest. Block 0 of each group is the null
block: it stands for "not there" and is never handed out.

All groups share the block size and the hashes, so all tables of a request have equal
length; groups with a window hold only the blocks that a coming query still reads, with 0
in the table before them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from vllm.config.kv_cache import KVCacheConfig
from vllm.engine.request import Request

NULL_BLOCK = 0
_NEVER_PUBLISH = 1 << 60


class BlockPool:
    """Blocks 1 .. num_blocks - 1 of one group; every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, published ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1.0 - len(self._free) / max(1, self.num_blocks - 1)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return block in self._free

    def lookup(self, block_hash: bytes) -> int:
        """The published block of this content, or the null block."""
        return self._published.get(block_hash, NULL_BLOCK)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks, withdrawing what they published."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._published[block_hash]
                self._hash_of[block] = None
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block (null blocks aside)."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.ref_counts[block] == 0:
                del self._free[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference on each; the first of them will be reused first.

        A block without published content goes to the front of the queue: nothing is
        lost by reusing it.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a full, computed block findable; the first block of equal content stays."""
        if block == NULL_BLOCK or self._hash_of[block] is not None:
            return
        if self._published.setdefault(block_hash, block) == block:
            self._hash_of[block] = block_hash

    def withdraw_all(self) -> None:
        """Forget all published content."""
        self._hash_of = [None] * self.num_blocks
        self._published.clear()


class KVCacheManager:
    """Block tables of all requests over all groups, and the prefix cache."""

    def __init__(
        self, config: KVCacheConfig, enable_prefix_caching: bool, lookahead: int = 0
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.groups = config.groups
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = [BlockPool(n) for n in config.num_blocks]
        self._windowed = [i for i, g in enumerate(self.groups) if g.window is not None]
        self._no_blocks: list[list[int]] = [[] for _ in self.groups]
        self.max_chunk, self.max_sequence_tokens = _limits(config, lookahead)

    @property
    def usage(self) -> float:
        """Share of held blocks in the fullest group."""
        return max((pool.usage for pool in self.pools), default=0.0)

    @property
    def no_blocks(self) -> list[list[int]]:
        """An empty list a group; shared, so nobody may write to it."""
        return self._no_blocks

    def find_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """Longest computed beginning of the request that every group still has.

        Returns its length in tokens and a block table a group. At least the last known
        token is left to compute, since its logits are needed; a request that wants
        prompt log-probabilities gets no hit, since they come from computing the prompt.
        """
        tables: list[list[int]] = [[] for _ in self.groups]
        if not self.enable_prefix_caching or request.needs_whole_prompt:
            return 0, tables
        self._extend_hashes(request, len(request.token_ids))
        limit = (len(request.token_ids) - 1) // self.block_size
        hashes = request.block_hashes[:limit]
        found = len(hashes)
        for group, pool, table in zip(self.groups, self.pools, tables, strict=True):
            if group.window is not None:
                continue
            for block_hash in hashes[:found]:
                block = pool.lookup(block_hash)
                if block == NULL_BLOCK:
                    break
                table.append(block)
            found = len(table)
        if found and self._windowed:
            found = self._fit_windows(hashes[:found], tables)
        for table in tables:
            del table[found:]
        return found * self.block_size, tables

    def _fit_windows(self, hashes: list[bytes], tables: list[list[int]]) -> int:
        """Blocks of the longest prefix whose windows are all there; fills their tables."""
        runs: list[list[int]] = []  # consecutive published blocks that end at block i
        for index in self._windowed:
            lookup = self.pools[index].lookup
            tables[index] = [lookup(h) for h in hashes]
            run, lengths = 0, []
            for block in tables[index]:
                run = run + 1 if block != NULL_BLOCK else 0
                lengths.append(run)
            runs.append(lengths)
        for count in range(len(hashes), 0, -1):
            firsts = [self._first_needed(i, count * self.block_size) for i in self._windowed]
            if all(r[count - 1] >= count - first for r, first in zip(runs, firsts, strict=True)):
                for index, first in zip(self._windowed, firsts, strict=True):
                    tables[index][:first] = [NULL_BLOCK] * first
                return count
        return 0

    def _first_needed(self, group_index: int, num_computed_tokens: int) -> int:
        return self.groups[group_index].first_needed_block(num_computed_tokens, self.block_size)

    def can_admit(
        self,
        num_tokens: int,
        chunk_end: int,
        chunk: int,
        prefix: list[list[int]],
        spare: int,
    ) -> bool:
        """Whether a request of `num_tokens` known tokens fits with `spare` blocks left.

        `chunk_end` tokens will be there after its first step, and later steps compute at
        most `chunk` each; `prefix` are the blocks found for it.
        """
        now = -(-chunk_end // self.block_size)
        for group, pool, table in zip(self.groups, self.pools, prefix, strict=True):
            held = sum(1 for b in table if b != NULL_BLOCK)
            from_free = sum(1 for b in table if b != NULL_BLOCK and pool.is_free(b))
            need = now - len(table)
            if spare >= 0:
                peak = group.blocks_per_sequence(num_tokens, self.block_size, chunk)
                need = max(need, min(peak - held, pool.num_blocks - 1 - held)) + spare
            if need > pool.num_free - from_free:
                return False
        return True

    def start(self, request: Request, num_cached_tokens: int, prefix: list[list[int]]) -> None:
        """Give the request its cached prefix; `grow` adds the rest."""
        count = num_cached_tokens // self.block_size
        for pool, table in zip(self.pools, prefix, strict=True):
            pool.hold(table)
        request.block_tables = prefix
        request.first_held_block = [
            self._first_needed(i, num_cached_tokens) for i in range(len(self.groups))
        ]
        request.capacity = num_cached_tokens
        request.num_published_blocks = count
        request.next_publish_at = num_cached_tokens + self.block_size

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Make room for `num_tokens` tokens; returns the blocks appended in each group.

        Blocks behind the windows are given back first. None: a group has too few free
        blocks, and none was taken.
        """
        count = -(-(num_tokens - request.capacity) // self.block_size)
        if count <= 0:
            return self._no_blocks
        if self._windowed:
            self._release_behind_windows(request)
        for pool in self.pools:
            if count > pool.num_free:
                return None
        appended = []
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            blocks = pool.allocate(count)
            table += blocks
            appended.append(blocks)
        request.capacity += count * self.block_size
        return appended

    def _release_behind_windows(self, request: Request) -> None:
        for index in self._windowed:
            start = request.first_held_block[index]
            end = self._first_needed(index, request.num_computed_tokens)
            if end > start:
                table = request.block_tables[index]
                self.pools[index].release(table[start:end])
                table[start:end] = [NULL_BLOCK] * (end - start)
                request.first_held_block[index] = end

    def publish(self, request: Request) -> None:
        """Make the request's full blocks findable, up to its confirmed tokens.

        Only results that have come back count: a request that failed in this step must
        not leave its values to others.
        """
        full = min(request.num_confirmed_tokens, len(request.token_ids)) // self.block_size
        start = request.num_published_blocks
        request.next_publish_at = (full + 1) * self.block_size
        if not self.enable_prefix_caching or full <= start:
            return
        self._extend_hashes(request, full * self.block_size)
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            for index in range(start, full):
                pool.publish(table[index], request.block_hashes[index])
        request.num_published_blocks = full

    def free(self, request: Request) -> None:
        """Give back all blocks; the end of the sequence is reused before its beginning."""
        for pool, table in zip(self.pools, request.block_tables, strict=False):
            pool.release(reversed(table))
        request.block_tables = []
        request.first_held_block = []
        request.capacity = 0
        request.num_published_blocks = 0

    def reset_prefix_cache(self, holders: Iterable[Request]) -> None:
        """Forget all published content; what the holders compute stays private to them."""
        for pool in self.pools:
            pool.withdraw_all()
        for request in holders:
            request.num_published_blocks = _NEVER_PUBLISH

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        while (len(hashes) + 1) * size <= num_tokens:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else _salt_hash(request.cache_salt)
            tokens = array("q", request.token_ids[start : start + size]).tobytes()
            hashes.append(hash_block(parent, tokens))


def hash_block(parent: bytes, tokens: bytes) -> bytes:
    """Name of a block's content: a hash over its tokens and the hash of the block before.

    Cryptographic, since a collision would hand one user the cache of another.
    """
    return hashlib.blake2b(tokens, digest_size=16, key=parent).digest()


def _salt_hash(cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block: requests share blocks only within a salt."""
    if cache_salt is None:
        return b""
    return hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _limits(config: KVCacheConfig, lookahead: int) -> tuple[int, int]:
    """The most tokens that one step may compute of a sequence, and that one may have.

    A step of n tokens takes blocks for n + lookahead, where the sequence may have them.
    """
    max_chunk = max_tokens = 1 << 60
    for group, num_blocks in zip(config.groups, config.num_blocks, strict=True):
        whole = (num_blocks - 1) * config.block_size
        chunk = whole - lookahead - config.block_size - (group.window or 0) + 1
        if group.window is None or chunk < 1:
            max_tokens = min(max_tokens, whole)
        else:
            max_chunk = min(max_chunk, chunk)
    return max_chunk, max_tokens
