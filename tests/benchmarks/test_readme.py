"""The README's measured tables are those of the results files, and are made as promised."""

import json
import shlex

import pytest

from benchmarks import machine, readme, tables


@pytest.mark.parametrize("path", readme.DOCUMENTS, ids=lambda path: path.name)
def test_documents_equal_the_results(path):
    text = path.read_text()
    assert readme.rewritten(text, readme.DOCUMENTS[path]) == text, "run python -m benchmarks.readme"


def test_a_block_is_replaced_and_the_rest_is_kept(tmp_path):
    made = {"step": lambda results: f"| {results['value']} |"}
    (tmp_path / "step.json").write_text(json.dumps({"value": "\\1 new"}))
    text = "before\n<!-- benchmark step -->\nold\n\nold\n<!-- end step -->\nafter\n"
    new = readme.rewritten(text, made, tmp_path)
    assert new == "before\n<!-- benchmark step -->\n| \\1 new |\n<!-- end step -->\nafter\n"
    assert readme.rewritten(new, made, tmp_path) == new


def test_results_without_a_block_are_an_error(tmp_path):
    (tmp_path / "step.json").write_text("{}")
    with pytest.raises(readme.MarkerError, match="benchmark step"):
        readme._with_block("no markers", "step", "")
    assert readme.rewritten("no markers", {"step": str}, tmp_path / "empty") == "no markers"


def test_columns_are_aligned_and_numbers_stand_right():
    assert tables.markdown(["name", "n"], [["a", 1.5], ["bcdef", None], ["g", "90 %"]]) == (
        "| name  |    n |\n|-------|-----:|\n| a     |  1.5 |\n| bcdef |      |\n| g     | 90 % |"
    )


def test_the_command_of_a_result_runs_as_it_stands(monkeypatch):
    monkeypatch.setattr("sys.argv", ["policies.py", "compare", "--policy", "fixed fill", "--n", "16"])
    told = machine.provenance("benchmarks.policies")["command"]
    assert shlex.split(told) == [
        "python",
        "-m",
        "benchmarks.policies",
        "compare",
        "--policy",
        "fixed fill",
        "--n",
        "16",
    ]
