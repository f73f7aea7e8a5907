"""python -m benchmarks.characterize: the figures and tables of "Serving Masked Diffusion LLMs" (2608.23807) on any
model that jdllm loads, the shipped one by default.

    python -m benchmarks.characterize                              everything, into characterization/
    python -m benchmarks.characterize batches breakdown            these parts, and the report of all that are there
    python -m benchmarks.characterize levels --json levels.json    one part into one file, without a report

Each part's data are written when it is done. A part that is there is not measured again, unless --fresh is given or a
flag that it hangs on has changed; a model that has changed in its folder is not noticed. What the parts show:
docs/characterization.md.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdllm import runtime
from jdllm.runtime import DTYPES, UsageError

if TYPE_CHECKING:
    from benchmarks.characterize.parts import Part
    from benchmarks.characterize.subject import Subject

NAMES = ("levels", "requests", "decoders", "budgets", "batches", "breakdown", "scheduling")
BAR = 24
"""Characters of the progress bar."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code: 0, or 2 if what was given cannot work."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        _run(options)
    except UsageError as error:
        print(f"benchmarks.characterize: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    from benchmarks import tables
    from benchmarks.characterize import plots as draw
    from benchmarks.characterize import report  # JAX comes in here
    from benchmarks.characterize.parts import PARTS

    asked = [part for part in PARTS if part.name in (options.parts or NAMES)]
    plots = not options.no_plots and options.json is None
    if plots:
        draw.check_available()

    @functools.cache
    def subject() -> "Subject":
        from benchmarks.characterize.subject import open_subject

        return open_subject(options, log)

    for number, part in enumerate(asked, 1):
        title = f"[{number}/{len(asked)}] {part.name}"
        file = options.json or report.part_file(options.out, part.name)
        if options.json is None and not options.fresh and _known(file, part, options) is not None:
            log(f"{title}: measured already (--fresh measures again)")
            continue
        log(f"{title}: {part.figures}")
        data = _measure(part, subject, options, title)
        tables.write(file, data)
        print(f"\n{part.text(data)}\n", flush=True)
    if options.json is None:
        found = {part.name: _known(report.part_file(options.out, part.name), part, options) for part in PARTS}
        known = {name: data for name, data in found.items() if data is not None}
        print(f"report: {report.write(options.out, PARTS, known, plots)}")


def _measure(part: "Part", subject: Any, options: argparse.Namespace, title: str) -> dict[str, Any]:
    from benchmarks.machine import provenance

    begin = time.perf_counter()
    data = part.measure(subject, options, functools.partial(show, title))
    head = {**provenance("benchmarks.characterize"), "asked": _asked(part, options)}
    return {**head, "seconds": time.perf_counter() - begin, **data}


def _asked(part: "Part", options: argparse.Namespace) -> dict[str, Any]:
    """What of the command line a part's result hangs on, as JSON has it."""
    return {flag: str(v) if isinstance(v := getattr(options, flag), Path) else v for flag in part.flags}


def _known(file: Path, part: "Part", options: argparse.Namespace) -> dict[str, Any] | None:
    """A part's data, if they are there, whole, and what is asked for."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("asked") == _asked(part, options) else None


def show(title: str, done: int, total: int, text: str) -> None:
    """A progress bar on a terminal; elsewhere a line at every quarter."""
    if sys.stderr.isatty():
        filled = BAR * done // total
        bar = "#" * filled + "." * (BAR - filled)
        print(f"\r\x1b[K{title} [{bar}] {done} of {total}: {text}", end="\n" if done == total else "", file=sys.stderr)
    elif 4 * done // total != 4 * (done - 1) // total:
        log(f"{title}: {done} of {total}: {text}")


def log(text: str) -> None:
    """Progress; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError, naming the flag, for what is wrong on the command line itself."""
    for name in options.parts:
        if name not in NAMES:
            raise UsageError(f"PART: {name!r} is not known; use any of {', '.join(NAMES)}")
    if options.json is not None and len(options.parts) != 1:
        raise UsageError("--json: takes one part; --out has a JSON of all of them")
    for flag in ("n", "blocks", "max_tokens", "block_size"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')}: {value} must be at least 1")
    for flag in ("budgets", "batch"):
        for value in getattr(options, flag) or ():
            if value < 1:
                raise UsageError(f"--{flag}: {value} must be at least 1")
    if options.batch and max(options.batch) > options.n:
        raise UsageError(f"--batch: {max(options.batch)} is more than the {options.n} problems (--n)")
    if options.problems is not None and not options.problems.is_file():
        raise UsageError(f"--problems: {options.problems} is not a file")
    if options.problems is None and options.form != "orders":
        raise UsageError(f"--form: {options.form} needs a file of problems (--problems)")
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out: {options.out} is not a folder")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.characterize",
        description="The figures and tables of 'Serving Masked Diffusion LLMs' (2608.23807) on a model of your own.",
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"any of {', '.join(NAMES)}; default: all")
    add("--out", type=Path, default=Path("characterization"), metavar="DIR", help="default: characterization/")
    add("--json", type=Path, metavar="FILE", help="write the data of one part to this file, and nothing to --out")
    add("--fresh", action="store_true", help="measure again what is there already")
    add("--no-plots", action="store_true", help="a report without PNG files; matplotlib is not needed")
    add("--model", metavar="DIR", help="converted checkpoint; default: the shipped model")
    add("--base", metavar="DIR", help="the same without its D2F adapter, for other decoders; default: --model itself")
    add("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--problems", type=Path, metavar="FILE", help="JSON lines, .gz too; default: held-out orders")
    add("--form", choices=("orders", "gsm8k", "humaneval"), default="orders", help="what a line is (default orders)")
    add("--n", type=int, default=48, help="problems (default 48)")
    add("--max-tokens", type=int, help="longest answer, in whole blocks; default: the checkpoint's")
    add("--block-size", type=int, help="positions a block; default: the checkpoint's, else 32")
    add("--blocks", type=int, default=16, help="levels: answers of up to so many blocks of 32 (default 16)")
    add("--budgets", type=int, nargs="+", help="budgets: values of max_tokens; default: a quarter, a half, all of it")
    add("--batch", type=int, nargs="+", help="batches: sizes (default 1 2 4 8 16)")
    return parser


if __name__ == "__main__":
    runtime.configure()  # the compile cache, before JAX is imported
    sys.exit(main())
