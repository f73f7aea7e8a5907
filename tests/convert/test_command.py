"""The command itself: paths, flags, what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jdllm.checkpoint import CheckpointError, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("form", ["relative", "home", "slash", "space", "parents"])
def test_h2_paths_are_resolved(base, run, tmp_path, monkeypatch, form):
    base().write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    source, target, where = {
        "relative": ("base", "out", "out"),
        "home": ("~/base", "~/out", "out"),
        "slash": ("base/", "out/", "out"),
        "space": ("./base", "my out", "my out"),
        "parents": ("base", "a/b/out", "a/b/out"),
    }[form]
    assert run(source, target)[0] == 0
    assert len(load(where).params) == 21
    assert len(load(f"~/{where}/").params) == 21


def test_what_goes_along(base, run, tmp_path):
    folder = base().write()
    for name in ("tokenizer.json", "chat_template.jinja", "vocab.json", "modeling_llada.py", "notes.txt"):
        (folder / name).write_text("{}")
    assert run(folder, tmp_path / "out")[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja", "config.json", "jdllm.json", "tokenizer.json", "vocab.json", "weights",
    ]  # fmt: skip
    record = json.loads((tmp_path / "out" / "jdllm.json").read_text())
    assert {key: record[key] for key in ("format", "family", "decoder", "dtype", "source", "adapter")} == {
        "format": 1, "family": "llada", "decoder": "llada", "dtype": "float32", "source": "base", "adapter": None,
    }  # fmt: skip
    assert str(tmp_path) not in json.dumps(record)


def test_dry_run_prints_the_plan_and_writes_nothing(base, adapter, run, tmp_path):
    source = base()
    lora = adapter(source).write()
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run(source.write(), tmp_path / "out", "--lora", lora, "--dry-run", "--dtype", "bfloat16")
    assert code == 0
    for text in ("21 in 5 groups", "bfloat16", "r 4, alpha 8", "8 weights", "nothing written"):
        assert text in out
    assert [path for path in sorted(tmp_path.rglob("*")) if "base" not in path.parts] == before


def test_existing_targets(base, run, refuse, tmp_path):
    folder = base().write()
    out = tmp_path / "out"
    assert run(folder, out)[0] == 0
    refuse(folder, out, words=[str(out), "--overwrite"])
    assert run(folder, out, "--overwrite", "--dtype", "bfloat16")[0] == 0
    assert load(out).meta["dtype"] == "bfloat16"
    (tmp_path / "empty").mkdir()
    refuse(folder, tmp_path / "empty", words="--overwrite")
    assert run(folder, tmp_path / "empty", "--overwrite")[0] == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    refuse(folder, tmp_path / "other", "--overwrite", words="not a jdllm checkpoint")
    refuse(folder, folder, "--overwrite", words="holds the source")
    refuse(folder, folder / "config.json", "--overwrite", words="not a jdllm checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "empty", "other", "out"]


def test_overwrite_keeps_the_old_checkpoint_when_the_new_one_fails(base, run, tmp_path, monkeypatch):
    folder, out = base().write(), tmp_path / "out"
    assert run(folder, out)[0] == 0

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jdllm.convert.orbax_format.write_all", full)
    code, _, err = run(folder, out, "--overwrite", "--dtype", "bfloat16")
    assert code == 2 and "error: No space left on device" in err
    assert load(out).meta["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_a_full_disk_is_noticed_beforehand(base, refuse, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refuse(base().write(), tmp_path / "a" / "out", words=["GB free", "needs"])


@pytest.mark.parametrize("args", [[], ["only"], ["a", "b", "--dtype", "int8"], ["a", "b", "--fast"], ["", "out"]])
def test_bad_arguments_are_one_line(run, args):
    code, _, err = run(*args)
    assert code == 2 and err.startswith("jdllm.convert: error: ") and len(err.splitlines()) == 1


def test_a_failed_verify_exits_1_and_leaves_nothing(base, run, tmp_path, monkeypatch):
    monkeypatch.setattr("jdllm.convert.orbax_format._transpose", lambda matrix, out, scratch: out.fill(0.1))
    code, _, err = run(base().write(), tmp_path / "out", "--verify")
    assert code == 1 and "verify failed" in err and "bound" in err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def _sparse_base(folder: Path) -> Path:
    """A checkpoint of about 800 MB that takes no disk."""
    from jdllm.config import model_config
    from jdllm.convert.names import weights

    hf = {
        "model_type": "llada", "vocab_size": 64000, "d_model": 2048, "n_layers": 4, "n_heads": 16,
        "mlp_hidden_size": 4096, "max_sequence_length": 64, "weight_tying": True, "mask_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    header, offset = {}, 0
    for weight in weights(model_config(hf)):
        size = 2 * weight.shape[0] * (weight.shape[1] if len(weight.shape) == 2 else 1)
        header[weight.tensor] = {"dtype": "BF16", "shape": weight.shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_nothing_that_loads(run, tmp_path, stop):
    source, out = _sparse_base(tmp_path / "base"), tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "jdllm.convert", str(source), str(out)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        partial = tmp_path / f".out.partial-{process.pid}"
        deadline = time.monotonic() + 60
        while not any(partial.glob("weights/*/0.0")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        os.kill(process.pid, stop)
        process.wait()
    assert process.returncode != 0
    assert not out.exists()
    if stop == signal.SIGTERM:
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
    else:
        with pytest.raises(CheckpointError, match="unfinished"):
            load(partial)
        code, _, err = run(source, out, "--dry-run")
        assert code == 0 and f"{partial} was left by a run that was killed" in err


def test_the_plain_path_imports_neither_jax_nor_torch():
    """They would cost more memory than the conversion."""
    program = "import sys, jdllm.convert.__main__ as m; print({'jax', 'torch', 'orbax'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
