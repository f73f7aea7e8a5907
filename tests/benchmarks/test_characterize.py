"""The characterization command: one small run of every part, what it writes, resuming it, and what it refuses."""

import json

import pytest

from benchmarks.characterize import __main__ as characterize
from benchmarks.characterize import parts, plots, report, subject
from benchmarks.characterize.parts import PARTS
from benchmarks.machine import ROOT


def test_the_command_line_names_the_parts_that_there_are():
    assert tuple(part.name for part in PARTS) == characterize.NAMES


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """The model's parts on a few problems, with fewer programs than usual, which compile sooner."""
    out = tmp_path_factory.mktemp("characterization")
    flags = ["--out", str(out), "--n", "2", "--batch", "2", "--budgets", "16", "64", "--max-tokens", "64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "WINDOWS", (4, 4))
        assert characterize.main(["requests", "budgets", "batches", *flags]) == 0
    return out, flags


def data_of(out, name):
    return json.loads(report.part_file(out, name).read_text())


def test_requests_lie_on_the_law(small_run):
    data = data_of(small_run[0], "requests")
    paper, lower = data["settings"]
    assert (paper["skip_threshold"], lower["skip_threshold"]) == (1.0, 0.9)
    assert paper["on_law"] == 1.0 and lower["nfe"]["mean"] < paper["nfe"]["mean"]
    for row in paper["requests"]:
        assert row["nfe"] == 8 * row["blocks"] and row["written"] <= row["blocks"]
        assert 0 < row["confidence"] <= row["highest"] <= 1 and row["entropy"] > 0 and row["prompt"] > 0


def test_a_small_budget_truncates(small_run):
    small, large = data_of(small_run[0], "budgets")["rows"]
    assert (small["budget"], small["most_by_law"], large["most_by_law"]) == (16, 16, 64)
    assert small["truncated"] > large["truncated"] == 0
    assert small["nfe"]["most"] <= 16 and small["accuracy"] < large["accuracy"]


def test_batches_give_equal_answers(small_run):
    alone, both = data_of(small_run[0], "batches")["rows"]
    assert (alone["batch"], both["batch"]) == (1, 2)
    assert both["equal"] == both["count"] == 2 and both["accuracy"] == alone["accuracy"]
    assert both["steps"] < alone["steps"] and alone["ms_per_step"] == alone["ms_per_step_apart"]


def test_the_report_has_every_part_its_plot_and_its_origin(small_run):
    out, _ = small_run
    content = (out / report.REPORT).read_text()
    for part in PARTS:
        measured = part.name in ("requests", "budgets", "batches")
        assert (f"## {part.figures}" in content) == measured
        assert (out / f"{part.name}.png").exists() == measured and (f"]({part.name}.png)" in content) == measured
    assert "commit " in content and "first-step entropy" in content
    assert list(json.loads((out / report.RESULTS).read_text())) == ["requests", "budgets", "batches"]


def test_what_is_there_is_not_measured_again(small_run, monkeypatch, capsys):
    out, flags = small_run

    def refuse(*_):
        raise AssertionError("measured again")

    # The model is not even opened.
    monkeypatch.setattr("benchmarks.characterize.subject.open_subject", refuse)
    assert characterize.main(["requests", "batches", *flags]) == 0
    assert "batches: measured already" in capsys.readouterr().err
    for further in (["--fresh"], ["--block-size", "4"]):  # with other settings, what is there is of no use
        with pytest.raises(AssertionError, match="measured again"):
            characterize.main(["requests", "--no-plots", *flags, *further])
    report.part_file(out, "budgets").write_text('{"asked"')  # a run that ended in the middle of a write
    with pytest.raises(AssertionError, match="measured again"):
        characterize.main(["budgets", *flags])


def test_scheduling_is_the_papers_table(tmp_path, capsys):
    assert characterize.main(["scheduling", "--out", str(tmp_path), "--no-plots"]) == 0
    out = capsys.readouterr().out
    assert all(cell in out for cell in ("19.6", "36.2", "52.3", "87.9", "55 %", "5.1"))
    content = (tmp_path / report.REPORT).read_text()
    assert "Table" in content and ".png" not in content and not list(tmp_path.glob("*.png"))


def test_the_committed_report_is_what_its_data_say():
    out = ROOT / "benchmarks" / "results" / "characterization"
    found = {part.name: data_of(out, part.name) for part in PARTS}
    assert report.markdown(PARTS, found, drawn=True) == (out / report.REPORT).read_text()
    assert json.loads((out / report.RESULTS).read_text()) == found


FAKE = {
    "decoders": {
        "rows": [
            {"decoder": name, "all_nfe": nfe, "accuracy": right}
            for name, nfe, right in (("d2f, skip 1", [8, 16], 1.0), ("base, llada", [64, 64], None))
        ]
    },
    "breakdown": {"rows": [{"batch": 1, "steps_per_dispatch": 4, "device_ms": 0.5, "host_ms": 0.1}]},
    "levels": {
        "stride": 29,
        "block_size": 32,
        "lower_skip": 0.9,
        "rows": [{"n": n, "law": 29 * n + 3, "nfe": 29 * n + 3, "nfe_sure_lower_skip": 8} for n in (1, 2)],
    },
    "scheduling": {
        "limit": 25.0,
        "rows": [{"rho": rho, "p50": 1.0, "p90": 2.0, "p99": 3.0} for rho in (0.3, 0.5)],
    },
}


@pytest.mark.parametrize("name", FAKE)
def test_the_other_parts_are_drawn(name, tmp_path):
    (part,) = (part for part in parts.PARTS if part.name == name)
    plots.save(part.draw, part.panels, FAKE[name], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, named",
    [
        (["nonsense"], "PART: 'nonsense' is not known; use any of levels"),
        (["--json", "x.json"], "--json: takes one part"),
        (["--n", "0"], "--n: 0 must be at least 1"),
        (["--block-size", "-1"], "--block-size: -1"),
        (["--batch", "0"], "--batch: 0"),
        (["--batch", "9", "--n", "8"], "--batch: 9 is more than the 8 problems"),
        (["--budgets", "0"], "--budgets: 0"),
        (["--problems", "/nowhere.jsonl"], "--problems: /nowhere.jsonl is not a file"),
        (["--form", "gsm8k"], "--form: gsm8k needs a file"),
        (["budgets", "--model", "/nowhere"], "--model: /nowhere is not a folder"),
        (["--out", __file__], "--out: "),
        (["budgets", "--budgets", "12"], "--budgets: 12 must be whole blocks of 8"),
        (["requests", "--max-tokens", "20"], "--max-tokens: 20 must be whole blocks"),
        (["requests", "--max-tokens", "504"], "--max-tokens: 504 behind the longest prompt"),
        (["requests", "--base", "/nowhere"], "--base: /nowhere is not a folder"),
    ],
)
def test_bad_flags_are_named(flags, named, tmp_path, capsys):
    out = [] if "--out" in flags else ["--out", str(tmp_path)]
    assert characterize.main([*flags, *out]) == 2
    assert named in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert characterize.main(["levels", "--out", str(tmp_path)]) == 2
    assert ".[bench]" in capsys.readouterr().err
