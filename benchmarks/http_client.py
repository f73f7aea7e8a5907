"""HTTP/1.1 on plain sockets, for clients that a library would not let misbehave: they read slowly, stop, hang up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

Address = tuple[str, int]
"""Host and port."""

SMALL = 4096
"""Bytes that a slow reader's kernel and program take in before the server has to wait for it."""


class HungUpError(Exception):
    """The server closed the connection before the answer was complete."""


class Connection:
    """One connection, kept alive between answers that are read to their end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, address: Address, small: bool = False) -> "Connection":
        """Connect; with ``small`` buffers, so that the server notices when nobody reads."""
        sock = socket.socket()
        sock.setblocking(False)
        try:
            if small:  # before it connects: this is the window that it offers
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            await asyncio.get_running_loop().sock_connect(sock, address)
            reader, writer = await asyncio.open_connection(sock=sock, limit=SMALL if small else 1 << 16)
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        claim: int | None = None,
    ) -> None:
        """Send a request. ``claim``: the Content-Length that is told, where it is not the body's."""
        told = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
        if claim is not None:
            told["Content-Length"] = str(claim)
        await self.send_raw(_head(method, path, {**told, **(headers or {})}) + body)

    async def send_chunked(self, path: str, count: int, chunk: bytes) -> None:
        """POST a body of ``count`` equal chunks, whose size nobody is told in advance."""
        await self.send_raw(_head("POST", path, {"Host": "localhost", "Transfer-Encoding": "chunked"}))
        framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        for _ in range(count):
            await self.send_raw(framed)
        await self.send_raw(b"0\r\n\r\n")

    async def send_raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def status(self) -> int:
        """Read the head of the answer; its fields are in ``headers`` then, by their names in lower case.

        Raises:
            HungUpError: nothing came.
        """
        try:
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        except (OSError, EOFError) as error:
            raise HungUpError("before the head of the answer") from error
        fields = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in fields}
        return int(first.split()[1])

    async def pieces(self, most: int = 1 << 16, pause: float = 0.0) -> AsyncIterator[bytes]:
        """The body as it comes, at most ``most`` bytes at once and ``pause`` seconds after each.

        Raises:
            HungUpError: it is not complete.
        """
        if self.headers.get("transfer-encoding") != "chunked":
            async for piece in self._piece(int(self.headers.get("content-length", "0")), most, pause):
                yield piece
            return
        while size := int(await self._line() or b"0", 16):
            async for piece in self._piece(size, most, pause):
                yield piece
            await self._line()
        await self._line()

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self, most: int = 1 << 16, pause: float = 0.0) -> AsyncIterator[str]:
        """The data of server-sent events as they come, comments left out."""
        rest = b""
        async for piece in self.pieces(most, pause):
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[len(b"data: ") :].decode()

    def close(self) -> None:
        """Hang up, whatever is on the way."""
        self._writer.close()

    async def _piece(self, size: int, most: int, pause: float) -> AsyncIterator[bytes]:
        while size:
            try:
                data = await self._reader.read(min(size, most))
            except OSError as error:
                raise HungUpError("in mid-answer") from error
            if not data:
                raise HungUpError("in mid-answer")
            size -= len(data)
            yield data
            if pause:
                await asyncio.sleep(pause)

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except OSError as error:
            raise HungUpError("in mid-answer") from error
        if not line.endswith(b"\n"):
            raise HungUpError("in mid-answer")
        return line.strip()


async def ask(address: Address, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own."""
    connection = await Connection.open(address)
    try:
        await connection.send(method, path, b"" if body is None else json.dumps(body).encode())
        return await connection.status(), await connection.body()
    finally:
        connection.close()


def _head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")
