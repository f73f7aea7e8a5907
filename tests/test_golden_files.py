"""Every golden trace as a user runs it: ``python -m jdllm.convert``, then ``python -m jdllm.generate`` on one file for
each checkpoint, all decoders mixed."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from jdllm.config import DecodeConfig

GOLDEN = Path(__file__).parent / "data" / "golden"
ALGORITHMS = ("d2f:llada", "llada_vanilla", "fast_dllm_llada", "d2f:dream", "dream_vanilla", "fast_dllm_dream")
MODELS = {
    "llada-tiny": "llada-tiny-d2f-lora",
    "llada-tiny-gqa": "llada-tiny-gqa-lora",
    "dream-tiny": "dream-tiny-d2f-lora",
}
COUNT = 65


def test_the_count_of_traces(golden):
    assert sum(len(golden.traces(algorithm)) for algorithm in ALGORITHMS) == COUNT


@pytest.mark.slow
@pytest.mark.parametrize(("model", "adapter"), [pair for m, a in MODELS.items() for pair in ((m, None), (m, a))])
def test_tokens_and_passes_of_all_traces_through_the_commands(golden, model, adapter, tmp_path):
    traces = [
        t for algorithm in ALGORITHMS for t in golden.traces(algorithm) if (t.model, t.adapter) == (model, adapter)
    ]
    assert traces
    random.Random(1).shuffle(traces)
    lora = ["--lora", str(GOLDEN / adapter)] if adapter else []
    command([sys.executable, "-m", "jdllm.convert", str(GOLDEN / model), str(tmp_path / "model"), *lora])
    lines = [json.dumps({"id": t.name, "prompt_ids": list(t.prompt), **_settings(t.decode)}) for t in traces]
    (tmp_path / "in").write_text("\n".join(lines))
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    command([sys.executable, "-m", "jdllm.generate", "--model", str(tmp_path / "model"), "--dtype", "float32", *files])
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    for trace, answer in zip(traces, answers, strict=True):
        assert answer["id"] == trace.name
        assert (answer["canvas_ids"], answer["nfe"]) == (trace.expected_ids, trace.nfe), trace.name


def _settings(decode: DecodeConfig) -> dict:
    """What a line says beside its prompt: the settings that are not the defaults. Stop ids are the tokenizer's."""
    default = dataclasses.asdict(DecodeConfig())
    changed = {name: value for name, value in dataclasses.asdict(decode).items() if value != default[name]}
    changed.pop("eot_id", None)
    return {"decoder": decode.decoder, "early_stop": False, **changed}


def command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
