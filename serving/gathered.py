"""One write for all that a connection is given in one turn of the event loop: an answer's head and body, or the last
events of a stream. Every write wakes its reader, and costs as much as writing the JSON."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST = 1 << 16
"""Bytes that are not held back to the turn's end: the transport shall know soon when it is to pause its writer."""


class GatheredTransport:
    """A transport whose writes reach the one below at the end of the event loop's turn, as one."""

    def __init__(self, below: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._below, self._loop = below, loop
        self._held: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def write(self, data: bytes) -> None:
        """Hold it back until the turn ends."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._size += len(data)
        if self._size > MOST:
            self._flush()

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._below.close()

    def _flush(self) -> None:
        if self._held:
            data, self._held, self._size = b"".join(self._held), [], 0
            self._below.write(data)


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol on such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """uvicorn's, which keeps the transport."""
        super().connection_made(cast(asyncio.Transport, GatheredTransport(transport, self.loop)))
