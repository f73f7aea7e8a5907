"""Settings reach JAX only if they are there before it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdllm import runtime
from jdllm.runtime import UsageError


def python(code: str, **env) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_do_not_import_jax_before_the_settings():
    code = "import sys, jdllm.serve, jdllm.generate, jdllm.serving.api; print([m for m in sys.modules if m == 'jax'])"
    assert python(code).strip() == "[]"


def test_settings_are_in_force_when_jax_comes(tmp_path):  # I6
    code = f"""
from jdllm import runtime
runtime.configure(memory_fraction=0.3, cache={str(tmp_path / "a cache")!r})
import os, jax
print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)
print(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
"""
    assert python(code, JAX_PLATFORMS="cpu").split("\n")[:2] == [f"{tmp_path / 'a cache'} 0.0", "0.3"]
    assert (tmp_path / "a cache").is_dir()


def test_what_is_asked_for_wins_over_the_environment_and_that_over_defaults(tmp_path):
    env = dict(XLA_PYTHON_CLIENT_MEM_FRACTION="0.5", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))
    code = "from jdllm import runtime; print(*list(runtime.configure({}).values())[:2])"
    assert python(code.format(""), **env).strip() == f"{tmp_path / 'theirs'} 0.5"
    asked = f"memory_fraction=0.3, cache={str(tmp_path / 'ours')!r}"
    assert python(code.format(asked), **env).strip() == f"{tmp_path / 'ours'} 0.3"
    assert python(code.format("cache=''"), **env).strip() == "0.5"


def test_bad_settings_name_their_flag(tmp_path):
    (tmp_path / "file").write_text("")
    code = f"""
from jdllm import runtime
for settings in (dict(memory_fraction=1.5), dict(memory_fraction=0), dict(cache={str(tmp_path / "file" / "x")!r})):
    try:
        runtime.configure(**settings)
    except runtime.UsageError as error:
        print(error)
"""
    lines = python(code).splitlines()
    assert [line.split(":")[0] for line in lines] == ["--memory-fraction"] * 2 + ["--compile-cache"]


def test_too_late_is_an_error():
    import jax  # noqa: F401

    with pytest.raises(RuntimeError, match="before JAX"):
        runtime.configure()


def test_model_folder(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        runtime.model_folder(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no converted checkpoint"):
        runtime.model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="not converted yet"):
        runtime.model_folder(str(tmp_path))
    (tmp_path / "jdllm.json").write_text("{}")
    assert runtime.model_folder(str(tmp_path) + "/") == tmp_path.resolve()


def test_the_shipped_model_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "SHIPPED", tmp_path)
    with pytest.raises(UsageError, match="no shipped model"):
        runtime.model_folder(None)
    (tmp_path / "orders-d2f").mkdir()
    assert runtime.model_folder(None) == tmp_path / "orders-d2f"


def test_decode_defaults():
    assert runtime.decode_defaults({}) == {}
    assert runtime.decode_defaults({"defaults": {"block_size": 16}}) == {"block_size": 16}
    for bad in ({"block_size": 0}, {"blocks": 3}):
        with pytest.raises(UsageError, match="defaults"):
            runtime.decode_defaults({"defaults": bad})


def test_serve_refuses_bad_flags_in_one_line(tmp_path):
    (tmp_path / "jdllm.json").write_text(json.dumps({}))
    taken = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"
    port = int(python(taken))
    import socket

    with socket.create_server(("127.0.0.1", port)):
        for flags, name in (
            (["--max-rows", "0"], "--max-rows"),
            (["--port", "70000"], "--port"),
            (["--port", str(port)], "--port"),
            (["--host", "256.1.1.1"], "--host"),
            (["--chat-template", str(Path("/nowhere"))], "--chat-template"),
            (["--queue-limit", "-1"], "--queue-limit"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "jdllm.serve", "--model", str(tmp_path), *flags], capture_output=True, text=True
            )
            assert done.returncode == 2 and name in done.stderr and done.stderr.count("\n") == 1, done.stderr
