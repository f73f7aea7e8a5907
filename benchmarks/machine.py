"""What a measurement was made on: versions, commit, processor, and the machine's own matrix peak."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).parents[1]


def provenance(module: str) -> dict[str, Any]:
    """The head of a results file: commit, versions, machine and the command, given the benchmark's module name."""
    return {
        "commit": commit(),
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "torch", "numpy")},
        "machine": {
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "cpu": cpu_name(),
            "device": jax.devices()[0].device_kind,
            "python": platform.python_version(),
        },
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, marked when the working tree differs from it; None outside a repository."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        # Results and what is made of them are written into the tree by the benchmarks themselves.
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!README.md", ":!docs"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def matrix_peak(size: int = 2048, seconds: float = 3.0) -> float:
    """Floating-point operations a second of the best of many float32 products [size, size] x [size, size] in JAX."""
    multiply = jax.jit(jnp.matmul)
    a = jax.random.normal(jax.random.key(0), (size, size))
    b = jax.random.normal(jax.random.key(1), (size, size))
    multiply(a, b).block_until_ready()
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin = time.perf_counter()
        multiply(a, b).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
