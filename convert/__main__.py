"""``python -m jdllm.convert SRC DST``: a Hugging Face checkpoint, with or without a PEFT adapter, to a jdllm one.

Exit codes: 0 converted; 1 the result was written to a temporary folder but --verify rejected it; 2 bad input. After 1
and 2 nothing is left behind.
"""

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from jdllm.config import ConfigError
from jdllm.convert.errors import ConvertError
from jdllm.convert.plan import DTYPES, Plan, make_plan, mega
from jdllm.convert.progress import Progress
from jdllm.convert.target import check_space, check_target, leftovers, written_at_once
from jdllm.convert.write import Merged, write_checkpoint


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _say(f"error: {message} (see --help)")
        sys.exit(2)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _convert(args)
    except (ConvertError, ConfigError) as error:
        _say(f"error: {error}")
    except OSError as error:
        _say(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        return 130
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m jdllm.convert", description=__doc__.splitlines()[0].partition(": ")[2])
    parser.add_argument("src", metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument("dst", metavar="DST", help="folder to make")
    parser.add_argument("--lora", metavar="DIR", help="PEFT LoRA adapter to merge, in float32 with one cast at the end")
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES],
        help="dtype of the result (default: as stored; float32 where an adapter is merged)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run a prompt through the result and, where torch is installed, through a PyTorch forward of the source",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a jdllm checkpoint or empty")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan; write nothing")
    return parser


def _convert(args: argparse.Namespace) -> int:
    source, target = _resolved(args.src), _resolved(args.dst)
    adapter = _resolved(args.lora) if args.lora is not None else None
    plan = make_plan(source, adapter, args.dtype)
    check_target(target, args.overwrite, [source] + ([adapter] if adapter else []))
    check_space(target, plan.total_bytes)
    print(plan.describe())
    for note in plan.notes + [f"{path} was left by a run that was killed; delete it" for path in leftovers(target)]:
        _say(f"note: {note}")
    if args.dry_run:
        print(f"dry run   nothing written to {target}")
        return 0
    started = time.monotonic()
    with written_at_once(target) as folder:
        merged = write_checkpoint(plan, folder, Progress(plan.total_bytes))
        seconds = time.monotonic() - started
        if plan.adapter:
            print(f"merged    {_merge_summary(plan, merged)}")
        if args.verify:
            from jdllm.convert.verify import VerifyError, verify

            try:
                print(verify(plan, folder))
            except VerifyError as error:
                _say(f"verify failed, nothing was written: {error}")
                raise SystemExit(1) from None
    print(f"written   {target} ({mega(plan.total_bytes)} in {seconds:.1f} s)")
    return 0


def _merge_summary(plan: Plan, merged: Merged) -> str:
    assert plan.adapter is not None
    return (
        f"{len(merged.weights)} of {len(plan.adapter.changes)} merged, max |delta| {merged.max_delta:.3g}, "
        f"largest rounding error {merged.max_rounding:.3g} ({plan.dtype.name})"
    )


def _resolved(text: str) -> Path:
    """Orbax wants absolute paths; ``~``, a trailing slash and spaces are fine."""
    if not text:
        raise ConvertError("a path is empty")
    return Path(text).expanduser().resolve()


def _say(text: str) -> None:
    print(f"jdllm.convert: {text}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the temporary folder is removed
    sys.exit(main())
