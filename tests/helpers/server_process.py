"""``python -m jdllm.serve`` as a process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax


class Process:
    """A server process; its stderr is read as it comes."""

    def __init__(self, model: Path, *flags: str):
        command = [sys.executable, "-m", "jdllm.serve", "--model", str(model), "--port", "0", "--dtype", "float32"]
        command += ["--max-rows", "1", "--max-length", "64", *flags]
        # Programs are kept where those of the other tests are: the first run compiles, later ones are quick.
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.log = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.url = self.wait_for(r"listening at (\S+);", 60)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, pattern: str, seconds: float) -> str:
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log)):
            assert time.monotonic() < end and self.process.poll() is None, self.log
            time.sleep(0.02)
        return found[1] if found.groups() else found[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)
