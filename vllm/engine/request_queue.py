# SPDX-License-Identifier: Apache-2.0
"""Requests waiting for a place in the batch, in the order in which they get one."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from vllm.engine.request import Request


def priority_key(request: Request) -> tuple[int, float, int]:
    """Smaller is served first: the priority, then the arrival."""
    return request.priority, request.arrival_time, request.order


class RequestQueue(Protocol):
    """Waiting requests; `put_back` returns a preempted one."""

    def put(self, request: Request) -> None:
        """Add a new request."""

    def put_back(self, request: Request) -> None:
        """Return a request that had been taken; it goes before later arrivals."""

    def peek(self) -> Request | None:
        """The next request, or None."""

    def take(self) -> Request:
        """Remove and return the next request."""

    def discard(self, request: Request) -> None:
        """Remove a request wherever it is."""

    def __len__(self) -> int: ...


class FCFSQueue:
    """First come, first served; preempted requests return to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def put(self, request: Request) -> None:
        """Add at the end."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Add at the front; victims come newest first, so the oldest ends up first."""
        self._requests.appendleft(request)

    def peek(self) -> Request | None:
        """The first request, or None."""
        return self._requests[0] if self._requests else None

    def take(self) -> Request:
        """Remove and return the first."""
        return self._requests.popleft()

    def discard(self, request: Request) -> None:
        """Remove from anywhere, O(length)."""
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest priority value first, then the earliest arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._removed: set[Request] = set()

    def put(self, request: Request) -> None:
        """Add by priority."""
        heapq.heappush(self._heap, (priority_key(request), request))

    def put_back(self, request: Request) -> None:
        """Add by priority."""
        self.put(request)

    def peek(self) -> Request | None:
        """The most urgent request, or None."""
        while self._heap and self._heap[0][1] in self._removed:
            self._removed.remove(heapq.heappop(self._heap)[1])
        return self._heap[0][1] if self._heap else None

    def take(self) -> Request:
        """Remove and return the most urgent."""
        request = self.peek()
        if request is None:
            raise IndexError("take from an empty queue")
        heapq.heappop(self._heap)
        return request

    def discard(self, request: Request) -> None:
        """Remove from anywhere; its entry goes when it reaches the top."""
        self._removed.add(request)

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)


def make_queue(policy: str) -> RequestQueue:
    """The queue for `--scheduling-policy` ("fcfs" or "priority")."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
