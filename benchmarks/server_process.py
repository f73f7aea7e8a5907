"""``python -m jdllm.serve`` as a process that benchmarks watch from outside. Needs Linux's /proc."""

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.http_client import Address

_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class ServerProcess:
    """A server on a free port of this machine.

    Args:
        flags: of ``python -m jdllm.serve``.
        log: told a few lines of what it does.
        environment: beside that of this process.

    Attributes:
        address: where it listens.
    """

    def __init__(self, *flags: str, log: Callable[[str], None], environment: Mapping[str, str] = MappingProxyType({})):
        # A file: whoever read a pipe would be woken for every line, and takes the server's processors.
        self._errors = tempfile.NamedTemporaryFile("a")  # noqa: SIM115 (it lasts as long as this object)
        command = [sys.executable, "-m", "jdllm.serve", "--host", "127.0.0.1", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=self._errors, env={**os.environ, **environment})
        self._log = log
        self.address: Address = ("127.0.0.1", int(self._wait_for(r"listening at \S+:(\d+);", 60)))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """Its standard error so far."""
        return Path(self._errors.name).read_text()

    def wait_ready(self, seconds: float = 900) -> None:
        """Return once /ready says yes.

        Raises:
            SystemExit: it has ended, or it takes too long.
        """
        self._log("the server loads and compiles")
        until = time.monotonic() + seconds
        while get(self.address, "/ready")[0] != 200:
            self._check(until)
            time.sleep(0.2)

    def stop(self, seconds: float = 60) -> int:
        """End it with SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return code

    def _wait_for(self, pattern: str, seconds: float) -> str:
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.errors)):
            self._check(until)
            time.sleep(0.02)
        return found[1]

    def _check(self, until: float) -> None:
        if self.process.poll() is not None or time.monotonic() > until:
            self.process.kill()
            raise SystemExit("the server did not start:\n" + self.errors)


def get(address: Address, path: str, timeout: float = 30.0) -> tuple[int, bytes]:
    """Status and body of a GET."""
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def metrics(page: str) -> dict[str, float]:
    """The numbers of a /metrics page by name, those of all labels together (of no use for buckets)."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM (RSS)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
