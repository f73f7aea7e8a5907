"""Running a program that a model wrote: in a process of its own, with limits on time, memory, files and processes, in
an empty folder, and without network where the system lets a process give it up.

The limits keep an endless loop or a runaway list from taking the machine along. They are no wall against malice: the
program runs as this user and can read what this user can read.
"""

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_CHILD = """
import ctypes, resource, sys
seconds, memory, token = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
try:
    cut = ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0
except (OSError, AttributeError):
    cut = False
with open("network", "w") as file:
    file.write("cut" if cut else "open")
for kind, most in (
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 32),
    (resource.RLIMIT_NPROC, 32),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (most, most))
with open(sys.argv[1]) as file:
    program = file.read()
sys.argv = ["program"]
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
with open("ended", "w") as file:
    file.write(token)
"""
"""What the process runs first. A program that leaves early, by exit() say, never gets to the last line."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``passed``: the program ran to its end without an exception; else ``reason`` is one line on why not.
    ``network_cut``: whether it ran without network; None if it did not get that far."""

    passed: bool
    reason: str
    network_cut: bool | None


def run_program(program: str, seconds: int = 10, memory_bytes: int = 1 << 30) -> Outcome:
    """Run Python text; ``seconds`` bound both its processor time and the wall clock."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        command = [sys.executable, "-I", "-c", _CHILD, "program.py", str(seconds), str(memory_bytes), token]
        with open(folder / "errors", "wb") as errors:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": name},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
                reason = None
            except subprocess.TimeoutExpired:
                reason = f"stopped after {seconds} s"
            finally:
                with contextlib.suppress(ProcessLookupError):  # also what the program has started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        network = _read(folder / "network")
        passed = reason is None and process.returncode == 0 and _read(folder / "ended") == token
        lines = _read(folder / "errors").strip().splitlines()
        if reason is None and not passed:
            reason = lines[-1][:200] if lines else f"ended early with code {process.returncode}"
    return Outcome(passed, reason or "", {"cut": True, "open": False}.get(network))


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
