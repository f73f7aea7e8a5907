"""What a connection is given in one turn of the event loop goes out as one write."""

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from jdllm.serving.gathered import MOST, GatheredTransport


class Below:
    """A transport that notes what reaches it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed_after: int | None = None

    def is_closing(self) -> bool:
        return self.closed_after is not None

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed_after = len(self.writes)

    def get_extra_info(self, name: str) -> str:
        return f"{name} of the one below"


PIECES = st.lists(
    st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=9), st.integers(1, MOST // 8)), max_size=5
)


@given(st.lists(PIECES, max_size=5))
def test_a_turn_is_a_write_and_nothing_is_lost_or_moved(turns):
    below = Below()

    async def run() -> None:
        transport = GatheredTransport(below, asyncio.get_running_loop())
        for pieces in turns:
            before = len(below.writes)
            for piece in pieces:
                transport.write(piece)
            await asyncio.sleep(0)
            written = len(below.writes) - before
            assert written == bool(pieces) or (sum(map(len, pieces)) > MOST and written <= len(pieces))

    asyncio.run(run())
    assert b"".join(below.writes) == b"".join(piece for pieces in turns for piece in pieces)


def test_what_is_held_is_written_before_it_closes():
    below = Below()

    async def run() -> None:
        transport = GatheredTransport(below, asyncio.get_running_loop())
        assert transport.get_extra_info("socket") == "socket of the one below"
        transport.write(b"last ")
        transport.write(b"words")
        transport.close()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert (below.writes, below.closed_after) == ([b"last words"], 1)


def test_what_nobody_can_read_is_dropped():
    below = Below()

    async def run() -> None:
        transport = GatheredTransport(below, asyncio.get_running_loop())
        transport.writelines([b"to ", b"nobody"])
        below.close()  # as the event loop does when the connection is reset
        await asyncio.sleep(0)
        transport.close()

    asyncio.run(run())
    assert below.writes == []


def test_much_is_not_held_back():
    below = Below()

    async def run() -> None:
        transport = GatheredTransport(below, asyncio.get_running_loop())
        transport.write(bytes(MOST))
        assert not below.writes
        transport.write(b"1")
        assert len(below.writes) == 1

    asyncio.run(run())
    assert len(below.writes) == 1


def test_head_and_body_of_an_answer_are_one_write(serve, kit, monkeypatch):
    server, flush, writes = serve(kit.says("some words")), GatheredTransport.flush, []

    def noted(self: GatheredTransport) -> None:
        if self._held:
            writes.append(b"".join(self._held))
        flush(self)

    monkeypatch.setattr(GatheredTransport, "flush", noted)
    for k in range(3):
        answer = server.chat()
        assert len(writes) == k + 1 and writes[k].endswith(answer.content) and writes[k].startswith(b"HTTP/1.1 200")


def test_a_client_that_has_closed_its_own_side_gets_its_answer(serve, kit):
    server = serve(kit.says("some words"))
    for _ in range(20):
        with socket.create_connection(server.listener.getsockname(), 20) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1 << 16).endswith(b'{"status":"alive"}')
