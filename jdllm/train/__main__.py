"""``python -m jdllm.train``: the shipped model from nothing to the files in the package, and its measurements."""

import argparse
import json
import os
import random
import shutil
from pathlib import Path

import jax

from jdllm.checkpoint_format import RECORD
from jdllm.convert.__main__ import main as convert
from jdllm.models import llada
from jdllm.train import evaluate, export, lora, recipe, tasks, tokenizer, trainer

NAME = "orders"
SHIPPED = Path(__file__).resolve().parent.parent / "shipped"


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    args.run(args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jdllm.train", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    for name, run, text in (
        ("all", _all, "base, d2f and export, one after the other; continues what a killed run left in --out"),
        ("base", _base, "train the base model: masked diffusion, full attention"),
        ("d2f", _d2f, "train the D2F adapter on the base model in --out"),
        ("export", _export, "write Hugging Face, PEFT and jdllm checkpoints from what is in --out"),
    ):
        sub = command(name, run, text)
        sub.add_argument("--out", type=Path, required=True, help="work folder; the checkpoints go to OUT/shipped")
        sub.add_argument("--base-steps", type=int, default=recipe.BASE.steps)
        sub.add_argument("--d2f-steps", type=int, default=recipe.D2F.steps)
    sub = command("evaluate", _evaluate, "held-out exact match by decoder, answer length and threshold")
    sub.add_argument("--base", type=Path, default=SHIPPED / f"{NAME}-base", help="converted base checkpoint")
    sub.add_argument("--model", type=Path, default=SHIPPED / f"{NAME}-d2f", help="converted D2F checkpoint")
    sub.add_argument("--n", type=int, default=240, help="held-out orders")
    sub.add_argument("--split", choices=("test", "validation"), default="test")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    sub = command("sample", _sample, "print messages and their answers")
    sub.add_argument("--n", type=int, default=3)
    sub.add_argument("--seed", type=int, default=0)
    return parser


def _all(args: argparse.Namespace) -> None:
    _base(args)
    _d2f(args)
    _export(args)


def _use_every_core() -> None:
    """A device for each core: XLA runs much of a step in one thread."""
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)


def _base(args: argparse.Namespace) -> None:
    _use_every_core()
    schedule = trainer.Schedule(args.base_steps, recipe.BASE.peak)
    recipe.train_base(tokenizer.build(), args.out / "base", schedule)


def _d2f(args: argparse.Namespace) -> None:
    _use_every_core()
    base, _ = _trained_base(args.out)
    schedule = trainer.Schedule(args.d2f_steps, recipe.D2F.peak)
    recipe.train_d2f(tokenizer.build(), base, args.out / "d2f", schedule)


def _trained_base(out: Path) -> tuple[llada.Params, trainer.Progress]:
    return trainer.load(out / "base", llada.init(recipe.model(tokenizer.build()), recipe.SEED))


def _export(args: argparse.Namespace) -> None:
    cfg, target = recipe.model(tokenizer.build()), args.out / "shipped"
    base, base_cost = _trained_base(args.out)
    adapter, d2f_cost = trainer.load(args.out / "d2f", lora.init(cfg, recipe.SEED))
    hf, peft = target / f"{NAME}-hf", target / f"{NAME}-d2f-lora"
    for folder in (hf, peft):
        shutil.rmtree(folder, ignore_errors=True)
    export.write_checkpoint(hf, cfg, base)
    export.write_adapter(peft, adapter, hf.name)
    for arguments in ([str(target / f"{NAME}-base")], [str(target / f"{NAME}-d2f"), "--lora", str(peft)]):
        if convert([str(hf), *arguments, "--overwrite"]) != 0:
            raise SystemExit("conversion failed")
        _recommend(Path(arguments[0]) / RECORD)
    for stage, cost in (("base", base_cost), ("d2f", d2f_cost)):
        print(f"{stage}: {cost.step} steps, {cost.tokens / 1e6:.1f} M tokens, {cost.seconds / 60:.0f} minutes")


def _recommend(record: Path) -> None:
    """Add the decode settings that the model was measured with, which the server takes as its defaults."""
    content = json.loads(record.read_text())
    content["defaults"] = evaluate.DEFAULTS
    record.write_text(json.dumps(content, indent=2) + "\n")


def _evaluate(args: argparse.Namespace) -> None:
    results = evaluate.evaluate(args.base, args.model, args.n, args.split)
    if args.json:
        evaluate.write_json(args.json, results)


def _sample(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    for task in [tasks.order(rng, rng.randint(1, tasks.MAX_LINES)) for _ in range(args.n)]:
        print(json.dumps({"message": task.message, "answer": task.answer}, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
