"""Posts prepared bodies over a few connections and takes as little of the processors as it can, for a server that runs
beside it: an answer is looked at no further than to see its end. HTTP/1.1 on blocking sockets, one thread."""

import dataclasses
import selectors
import socket
from collections.abc import Iterator, Sequence

from benchmarks.http_client import Address

_HEAD_END, _LAST_CHUNK = b"\r\n\r\n", b"\r\n0\r\n\r\n"


class RefusedError(Exception):
    """The server did not answer a request; the text is what it said."""


@dataclasses.dataclass
class _Open:
    """A connection and the answer that it is reading; ``whole``: its length, 0 until the head tells, -1 if chunked."""

    socket: socket.socket
    index: int = 0
    answer: bytes = b""
    whole: int = 0

    def read(self) -> bool:
        """Take what is there; whether the answer is complete."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise RefusedError("the server closed the connection before the answer was complete")
        self.answer += data
        if not self.whole and (end := self.answer.find(_HEAD_END)) >= 0:
            length = self.answer[:end].lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self.whole = end + len(_HEAD_END) + int(length) if length else -1
        return self.answer.endswith(_LAST_CHUNK) if self.whole < 0 else len(self.answer) == self.whole


class LightClient:
    """Connections to a server, open from the start."""

    def __init__(self, address: Address, connections: int):
        self._connections = [_Open(socket.create_connection(address, 60)) for _ in range(connections)]
        for one in self._connections:
            one.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post_all(self, path: str, bodies: Sequence[bytes]) -> list[bytes]:
        """The answers to these bodies as they came, heads included, in the order of the bodies.

        Raises:
            RefusedError: the server hung up.
        """
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        waiting = enumerate([f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies])
        answers = [b""] * len(bodies)
        with selectors.DefaultSelector() as ready:
            busy = sum(self._send(one, waiting) for one in self._connections)
            for one in self._connections[:busy]:
                ready.register(one.socket, selectors.EVENT_READ, one)
            while busy:
                for key, _ in ready.select():
                    if key.data.read():
                        answers[key.data.index] = key.data.answer
                        if not self._send(key.data, waiting):  # idle from now on, and the server may hang up
                            ready.unregister(key.fileobj)
                            busy -= 1
        return answers

    def close(self) -> None:
        """Hang up."""
        for one in self._connections:
            one.socket.close()

    def _send(self, one: _Open, waiting: Iterator[tuple[int, bytes]]) -> bool:
        """Send the next request, if one is left."""
        for one.index, data in waiting:
            one.answer, one.whole = b"", 0
            one.socket.sendall(data)
            return True
        return False


def body(answer: bytes) -> bytes:
    """An answer without its head and chunks.

    Raises:
        RefusedError: its status is not 200.
    """
    head, _, rest = answer.partition(_HEAD_END)
    if b"chunked" in head.lower():
        rest, chunked = b"", rest
        while size := int((line := chunked.partition(b"\r\n"))[0] or b"0", 16):
            rest, chunked = rest + line[2][:size], line[2][size + 2 :]
    if head.split(b" ", 2)[1] != b"200":
        raise RefusedError(rest.decode())
    return rest
