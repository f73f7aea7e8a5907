"""Data flows one way: models <- denoise <- engine <- serving <- serve.py."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A file may import modules of its own layer and of the layers named here.
LAYERS = {
    "jdllm/model_config.py": (),
    "jdllm/config.py": ("jdllm.model_config",),
    "jdllm/models": ("jdllm.config",),
    "jdllm/denoise": ("jdllm.config", "jdllm.decoders", "jdllm.models"),
    "jdllm/buckets.py": ("jdllm.config", "jdllm.denoise"),
    "jdllm/decoders.py": ("jdllm.config",),
    "jdllm/adapters.py": (),
    "jdllm/engine.py": (
        "jdllm.config",
        "jdllm.models",
        "jdllm.denoise",
        "jdllm.decoders",
        "jdllm.adapters",
        "jdllm.buckets",
        "jdllm.costs",
    ),
    "jdllm/costs.py": ("jdllm.denoise",),
    "jdllm/checkpoint.py": ("jdllm.config", "jdllm.models", "jdllm.sharding", "jdllm.checkpoint_format"),
    "jdllm/sharding.py": ("jdllm.config", "jdllm.models"),
    "convert": (
        "jdllm.config",
        "jdllm.models",
        "jdllm.adapters",
        "jdllm.runtime",
        "jdllm.checkpoint",
        "jdllm.checkpoint_format",
        "jdllm.sharding",
        "jdllm.tokenizer",
    ),
    "jdllm/tokenizer.py": ("jdllm.config", "jdllm.runtime"),
}
FORBIDDEN = {
    "jdllm/generate.py": ("jdllm.serving", "jdllm.train", "benchmarks"),
    "jdllm/train": ("jdllm.serving", "benchmarks"),
    "serving": ("jdllm.train", "jdllm.serve", "benchmarks"),
    "jdllm/serve.py": ("jdllm.train", "benchmarks"),
}


def files(place: str) -> list[Path]:
    path = ROOT / place
    found = [path] if path.suffix else sorted(path.rglob("*.py"))
    assert found
    return found


def imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("jdllm", "benchmarks")}


def module(place: str) -> str:
    name = place.removesuffix(".py").replace("/", ".")
    return name if name.startswith("jdllm") else f"jdllm.{name}"


def under(name: str, layer: str) -> bool:
    return name == layer or name.startswith(layer + ".")


@pytest.mark.parametrize("place", LAYERS)
def test_allowed(place):
    allowed = (module(place), *LAYERS[place])
    for file in files(place):
        for name in imports(file) - {"jdllm", "jdllm.models", "jdllm.__version__"}:
            assert any(under(name, layer) for layer in allowed), f"{file} imports {name}"


@pytest.mark.parametrize("place", FORBIDDEN)
def test_forbidden(place):
    for file in files(place):
        for name in imports(file):
            assert not any(under(name, layer) for layer in FORBIDDEN[place]), f"{file} imports {name}"
