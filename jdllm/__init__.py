"""jdllm: a serving engine in JAX for masked diffusion language models.

Shape letters, used in einsum strings, docstrings and trailing comments everywhere:

    B  batch rows (slots)        S  canvas positions of a row      N  positions packed into one step
    R  rows a step looks at      T  queries of an attention tile   M  masked positions packed for the head
    Q  query heads               K  key/value heads               H  head size
    D  model width               F  feed-forward width            V  vocabulary            L  layers

Beside a checkout's ``pyproject.toml`` the packages ``jdllm.convert`` and ``jdllm.serving`` are the folders
``convert/`` and ``serving/`` of the repository; an installed wheel has them inside.
"""

from pathlib import Path

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and not (_root / "jdllm" / "convert").exists():
    __path__.append(str(_root))

__version__ = "0.1.0"
