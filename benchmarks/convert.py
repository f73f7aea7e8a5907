"""Memory and speed of jdllm.convert against ``cp`` of the same files: ``python -m benchmarks.convert [--json FILE]``.

A checkpoint of LLaDA-8B's widths, cut to a few layers, is made of random numbers in a temporary folder (and deleted).
Peak memory is the converter's maximum resident set as GNU time reports it (getrusage where GNU time is not installed),
the whole process with its interpreter; it is compared with the largest tensor group (a layer, the embedding or the
head). The files are in the page cache for both, and the rounds alternate; the best of each counts.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import tables
from benchmarks.machine import provenance
from jdllm.config import ModelConfig, model_config
from jdllm.convert.names import weights

GNU_TIME = "/usr/bin/time"
CASES = ("plain", "lora", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the temporary folder goes (default: the system's)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jdllm-convert-", dir=args.folder) as folder:
        rows = measure(Path(folder), args.layers, args.rounds)
    results = {**provenance("benchmarks.convert"), "layers": args.layers, "rounds": args.rounds, "rows": rows}
    if args.json:
        tables.write(args.json, results)
    print(table(results))


def table(results: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = [
        [
            row["case"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['mb_per_s']:.0f}",
            f"{row['share_of_cp']:.2f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['peak_over_group']:.2f}",
        ]
        for row in results["rows"]
    ]
    group = results["rows"][0]["group_bytes"] / 1e6
    note = (
        f"{results['layers']} layers of LLaDA-8B's widths, largest group of tensors {group:.0f} MB; best of "
        f"{results['rounds']} rounds; {results['machine']['cpu']}, {results['machine']['cpus']} CPUs; commit "
        f"{results['commit']}; `{results['command']}`"
    )
    header = ["case", "MB", "seconds", "CPU s", "MB/s", "of cp", "peak MB", "peak of largest group"]
    return f"{tables.markdown(header, rows)}\n\n{note}"


def measure(folder: Path, layers: int, rounds: int) -> list[dict]:
    """Rows of the table: ``cp`` first, then one a case; bytes are those of the source's weights."""
    cfg = model_config({**LLADA_8B, "n_layers": layers})
    source, adapter = folder / "source", folder / "adapter"
    total = make_source(source, cfg, layers)
    make_adapter(adapter, cfg)
    sizes: dict[str, int] = {}
    for weight in weights(cfg):
        sizes[weight.group] = sizes.get(weight.group, 0) + 2 * int(np.prod(weight.shape))
    flags = {"plain": [], "lora": ["--lora", str(adapter)], "float32": ["--dtype", "float32"]}
    best: dict[str, Run] = {}
    for _ in range(rounds):
        for case in ("cp", *CASES):
            out = folder / "out"
            if case == "cp":
                command = ["cp", "-r", str(source), str(out)]
            else:
                command = [sys.executable, "-m", "jdllm.convert", str(source), str(out), *flags[case]]
            now = run(command)
            shutil.rmtree(out)
            last = best.get(case, now)
            best[case] = Run(min(last.seconds, now.seconds), min(last.cpu, now.cpu), max(last.peak, now.peak))
    return [
        {
            "case": case,
            "bytes": total,
            "seconds": found.seconds,
            "cpu_seconds": found.cpu,
            "mb_per_s": total / 1e6 / found.seconds,
            "share_of_cp": best["cp"].seconds / found.seconds,
            "peak_bytes": found.peak,
            "group_bytes": max(sizes.values()),
            "peak_over_group": found.peak / max(sizes.values()),
        }
        for case, found in best.items()
    ]


class Run(NamedTuple):
    """Wall and processor seconds (user and system) and peak resident bytes of a command."""

    seconds: float
    cpu: float
    peak: int


def run(command: list[str]) -> Run:
    timed = [GNU_TIME, "-v", *command] if os.access(GNU_TIME, os.X_OK) else command
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(timed, capture_output=True, text=True)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
    reported = re.search(r"Maximum resident set size \(kbytes\): (\d+)", done.stderr)
    peak = int(reported[1]) if reported else after.ru_maxrss
    return Run(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak * 1024)


def make_source(folder: Path, cfg: ModelConfig, layers: int) -> int:
    """A bfloat16 checkpoint of random numbers in one file, written piece by piece; bytes of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLADA_8B, "n_layers": layers}))
    header, offset = {}, 0
    for weight in weights(cfg):
        size = 2 * int(np.prod(weight.shape))
        header[weight.tensor] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    # Random mantissas and signs under a few exponents: numbers between 2^-8 and 2^-5.
    block = rng.integers(0, 1 << 9, 1 << 23, dtype=np.uint16) + (119 << 7)
    block = (block | rng.integers(0, 2, block.size, dtype=np.uint16) << 15).astype("<u2")
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = offset
        while left:
            left -= file.write(block.view(np.uint8).data[: min(left, block.nbytes)])
    return offset


def make_adapter(folder: Path, cfg: ModelConfig) -> None:
    """A float32 adapter as D2F's: rank 32 on q_proj, k_proj, v_proj and attn_out."""
    from safetensors.numpy import save_file

    targets = ["q_proj", "k_proj", "v_proj", "attn_out"]
    rng, tensors = np.random.default_rng(1), {}
    for weight in weights(cfg):
        if weight.module.rpartition(".")[2] in targets:
            for side, shape in (("A", (32, weight.shape[1])), ("B", (weight.shape[0], 32))):
                name = f"base_model.model.{weight.module}.lora_{side}.weight"
                tensors[name] = rng.normal(0, 0.02, shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 32, "lora_alpha": 32, "target_modules": targets})
    )


LLADA_8B = {
    "model_type": "llada",
    "vocab_size": 126464,
    "embedding_size": 126464,
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
}

if __name__ == "__main__":
    main()
