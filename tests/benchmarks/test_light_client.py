"""The client of the server benchmark, which looks at nothing but where an answer ends."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest

from benchmarks.http_client import Address
from benchmarks.light_client import LightClient, RefusedError, body


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a body with itself; what it begins with says how."""
    with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /path HTTP/1.1\r\n")
            data = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            if data.startswith(b"late"):
                await asyncio.sleep(0.02)
            status = b"400 Bad" if data.startswith(b"bad") else b"200 OK"
            if data.startswith(b"chunked"):
                half = len(data) // 2
                parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (data[:half], data[half:], b""))
                answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + parts
            else:
                answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data)
            cut = len(answer) - 1 if data.startswith(b"cut") else len(answer)
            for at in range(0, cut, 7 if data.startswith(b"slowly") else 1 << 20):
                writer.write(answer[at : min(at + 7, cut)] if data.startswith(b"slowly") else answer[:cut])
                await writer.drain()
                await asyncio.sleep(0.001)
            if cut < len(answer) or data.startswith(b"bye"):
                return


@pytest.fixture
def address() -> Iterator[Address]:
    told: queue.Queue[tuple[Address, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        told.put((server.sockets[0].getsockname(), asyncio.get_running_loop(), stop))
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    found, loop, stop = told.get(timeout=10)
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)


KINDS = (b"late", b"plain", b"chunked", b"slowly", b"")


@pytest.mark.parametrize("connections", [1, 3, 40])
def test_answers_come_whole_and_in_the_order_of_the_requests(address, connections):
    sent = [b"%b %d" % (kind, i) for i, kind in enumerate(KINDS * 4)]
    with contextlib.closing(LightClient(address, connections)) as client:
        assert [body(answer) for answer in client.post_all("/path", sent)] == sent
        assert client.post_all("/path", []) == []


def test_the_server_may_hang_up_on_a_connection_that_has_no_more_to_do(address):
    with contextlib.closing(LightClient(address, 2)) as client:
        assert [body(answer) for answer in client.post_all("/path", [b"bye", b"late"])] == [b"bye", b"late"]


def test_what_is_refused_is_told(address):
    with contextlib.closing(LightClient(address, 2)) as client:
        good, bad = client.post_all("/path", [b"good", b"bad one"])
        assert body(good) == b"good"
        with pytest.raises(RefusedError, match="bad one"):
            body(bad)
        with pytest.raises(RefusedError, match="closed the connection"):
            client.post_all("/path", [b"cut"])
