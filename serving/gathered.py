"""One write for all that a connection is given in one turn of the event loop: an answer's head and body, or the last
events of a stream. Every write wakes its reader."""

import asyncio
from collections.abc import Iterable
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
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._size += len(data)
        if self._size > MOST:
            self.flush()

    def writelines(self, lines: Iterable[bytes]) -> None:
        """Hold these back as one."""
        self.write(b"".join(lines))

    def close(self) -> None:
        """Close once everything is written."""
        self.flush()
        self._below.close()

    def flush(self) -> None:
        """Write what is held; where nobody is left to read it, drop it."""
        data, self._held, self._size = b"".join(self._held), [], 0
        if data and not self._below.is_closing():
            self._below.write(data)


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol on such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """uvicorn's, which keeps the transport."""
        self._gathered = GatheredTransport(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._gathered))

    def eof_received(self) -> None:
        """The client sends nothing more, and the event loop closes the transport below after this. A client that has
        only closed its own side still reads."""
        self._gathered.flush()
        super().eof_received()
