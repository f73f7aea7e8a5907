"""The report: one Markdown file with every part that has been measured, its plots beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.characterize import plots
from benchmarks.characterize.parts import Part

REPORT, RESULTS = "report.md", "characterization.json"


def part_file(out: Path, name: str) -> Path:
    """Where a part's data lie."""
    return out / "parts" / f"{name}.json"


def plot_file(name: str) -> str:
    return f"{name}.png"


def write(out: Path, parts: Sequence[Part], found: Mapping[str, dict[str, Any]], drawn: bool) -> Path:
    """Write plots, the JSON of all parts, and the report; returns its path.

    Args:
        found: the data of the parts that there are, by name.
        drawn: with plots.
    """
    out.mkdir(parents=True, exist_ok=True)
    measured = [part for part in parts if part.name in found]
    if drawn:
        for part in measured:
            plots.save(part.draw, part.panels, found[part.name], out / plot_file(part.name))
    tables.write(out / RESULTS, {part.name: found[part.name] for part in measured})
    path = out / REPORT
    path.write_text(markdown(measured, found, drawn), encoding="utf-8")
    return path


def markdown(parts: Sequence[Part], found: Mapping[str, dict[str, Any]], drawn: bool) -> str:
    """The report's text."""
    text = ["# Characterization", "What each part shows, and what it does not: `docs/characterization.md`."]
    for part in parts:
        data = found[part.name]
        text += [f"## {part.figures}", part.text(data)]
        text += [f"![{part.figures}]({plot_file(part.name)})"] if drawn else []
        text += [note(part, data)]
    return "\n\n".join(text) + "\n"


def note(part: Part, data: Mapping[str, Any]) -> str:
    """What a part was measured on, and how to measure it again."""
    machine, seconds = data["machine"], data["seconds"]
    where = f"{machine['cpu']}, {machine['cpus']} CPUs, device {machine['device']}"
    return (
        f"{where}; jax {data['versions']['jax']}; {seconds:.0f} s; commit {data['commit']}; part `{part.name}` of "
        f"`{data['command']}`"
    )
