"""The step law: the paper's numbers from the formula, and the engine's counts equal to it."""

import json

import pytest

from benchmarks.characterize import __main__ as characterize
from benchmarks.characterize.levels import BLOCK, PAPER, paper_steps
from benchmarks.step_law import law, stride
from jdllm.config import DecodeConfig

DECODE = DecodeConfig(**PAPER, block_size=BLOCK)


def test_the_papers_levels():
    """178 + 29 k, k = 0 to 10: eleven levels up to the 512-token budget, the iteration that ends the loop counted."""
    assert [paper_steps(law(n, DECODE)) for n in range(6, 17)] == [178 + 29 * k for k in range(11)]


@pytest.mark.parametrize("budget, steps", [(128, 120), (256, 236), (512, 468)])
def test_the_papers_table_one(budget, steps):
    assert paper_steps(law(budget // BLOCK, DECODE)) == steps


@pytest.mark.parametrize(
    "block, add, decoded, six, sixteen",
    [
        (32, 0.5, 0.9, 177, 467),
        (32, 0.9, 0.5, 177, 467),
        (32, 0.1, 0.95, 187, 497),
        (32, 0.1, 0.5, 112, 272),
        (32, 1.0, 1.0, 192, 512),
        (64, 0.7, 0.95, 61 * 6 + 3, 61 * 16 + 3),
        (16, 0.0, 0.0, 21, 31),  # blocks are added one a step
    ],
)
def test_the_law_at_other_thresholds(block, add, decoded, six, sixteen):
    decode = DecodeConfig(block_size=block, block_add_threshold=add, decoded_token_threshold=decoded)
    assert (law(6, decode), law(16, decode)) == (six, sixteen)
    assert law(7, decode) - law(6, decode) == stride(decode)


def test_the_engine_keeps_the_law(tmp_path, capsys):
    file = tmp_path / "levels.json"
    assert characterize.main(["levels", "--blocks", "3", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert [row["n"] for row in data["rows"]] == [1, 2, 3] and data["stride"] == 29
    for row in data["rows"]:
        assert row["nfe"] == row["nfe_sure"] == row["law"] == 29 * row["n"] + 3
        assert row["paper_steps"] == row["paper_law"] == row["nfe"] + 1
        assert row["tokens"] == 32 * row["n"]
        # With random weights nothing is as sure as 0.9 either; with a large head much is.
        assert row["nfe_lower_skip"] == row["law"] > row["nfe_sure_lower_skip"]
    assert "The law holds in 3 of 3 rows" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
