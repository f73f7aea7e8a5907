"""What the documentation shows is run."""

import re
from pathlib import Path

import pytest

from jdllm import decoders
from jdllm.config import EngineConfig, RequestError
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.models import llada

DOCS = Path(__file__).parents[1] / "docs"


def test_the_decoder_of_the_page_on_decoders(tiny, monkeypatch):
    """Added as the page says: it takes part beside the others, in as many passes as it promises."""
    monkeypatch.setattr(decoders, "TABLE", dict(decoders.TABLE))
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "decoders.md").read_text(), re.DOTALL)
    exec(code, {})
    engine = Engine(llada.init(tiny, 0), tiny, EngineConfig(max_rows=2, max_length=64))
    engine.buckets = [Bucket(2, 128)]
    engine.compile()
    given = {"decoder": "halving", "max_tokens": 20, "block_size": 16, "early_stop": False}
    engine.insert(0, "halving", [1, 2, 3], decoders.decode_config(given, "llada"))
    engine.insert(1, "d2f", [1, 2, 3], decoders.decode_config({"max_tokens": 20}, "llada"))
    ended = {}
    while len(ended) < 2:
        ended |= {row.handle: row for row in engine.step() if not row.live}
    row = ended["halving"]
    assert row.nfe == 5 + 3 and len(row.canvas_ids) == 20 and tiny.mask_id not in row.canvas_ids
    assert sorted(row.committed[3:19].tolist()) == [1] * 8 + [2] * 4 + [3] * 2 + [4] + [5]
    with pytest.raises(RequestError, match="halving does not use it"):
        decoders.decode_config({**given, "threshold": 0.5}, "llada")


def test_the_settings_of_the_page_on_decoders_are_all():
    text = (DOCS / "decoders.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", text))
    assert set().union(*(d.settings for d in decoders.TABLE.values())) <= named
