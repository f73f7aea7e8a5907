"""The listening socket."""

import argparse
import errno
import socket
import time

import pytest

from jdllm import serve


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's")
def test_the_kernel_gives_up_a_peer_that_reads_nothing():
    at_any_port = argparse.Namespace(host="127.0.0.1", port=0)
    with serve._listen(at_any_port, unread_seconds=0.5) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        with listener.accept()[0] as connection:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # every buffer is full
                while True:
                    connection.send(bytes(1 << 16))
            until, error = time.monotonic() + 30, 0
            while not error and time.monotonic() < until:
                time.sleep(0.05)
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert error == errno.ETIMEDOUT


def test_answers_are_not_held_back():
    with serve._listen(argparse.Namespace(host="127.0.0.1", port=0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        with listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
