"""Every decoder, the adapters and infill through a real server: the base model with its D2F adapter beside it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_process import Process

from jdllm.config import DecodeConfig, EngineConfig
from jdllm.denoise.window import Bucket
from jdllm.engine import Engine
from jdllm.tokenizer import load

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
ADAPTER = "llada-tiny-d2f-lora"
NAMES = {
    "d2f:llada": "d2f-b8-paper",
    "llada_vanilla": "vanilla-cfg-0.5",
    "fast_dllm_llada": "fast-dual-thr0.9",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from jdllm.convert.__main__ import main as convert

    folder = tmp_path_factory.mktemp("decoders") / "base"
    assert convert([str(GOLDEN / "llada-tiny"), str(folder), "--dtype", "float32"]) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder):
    running = Process(folder, "--adapter", f"{ADAPTER}={GOLDEN / ADAPTER}", "--max-rows", "4", "--max-length", "128")
    running.wait_for("ready after", 300)
    yield running
    running.end()


def complete(server, **fields) -> dict:
    reply = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60)
    return reply.json() | {"status": reply.status_code}


def test_golden_traces_at_the_same_time(golden, server, folder):
    """D2F with its adapter, LLaDA with guidance (two slots) and Fast-dLLM: the official text, in one batch."""
    words = load(folder, golden.config("llada-tiny"))
    traces = [t for algorithm, name in NAMES.items() for t in golden.traces(algorithm) if t.name == name]
    assert len(traces) == len(NAMES)

    def ask(trace):
        changed = ("decoder", "max_tokens", "block_size", "steps", "cache", "threshold", "cfg_scale", "early_stop")
        fields = {name: getattr(trace.decode, name) for name in changed}
        if trace.decode.decoder == "d2f":
            fields = {k: v for k, v in fields.items() if k not in ("steps", "cache", "threshold", "cfg_scale")}
        if trace.decode.decoder == "fast-dllm":
            fields.pop("cfg_scale")
        return complete(server, model=trace.adapter or "base", prompt=trace.prompt, temperature=0, **fields)

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(ask, traces * 3))
    for trace, reply in zip(traces * 3, replies, strict=True):
        ids = trace.expected_ids
        ids = ids[: ids.index(361)] if 361 in ids else ids
        assert reply["status"] == 200, (reply, server.log)
        assert reply["choices"][0]["text"] == words.decode(ids), trace.name


def test_models_are_the_base_and_its_adapters(server):
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["base", ADAPTER]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"decoder": "dream"}, "decoder"),
        ({"decoder": "llada", "skip_threshold": 0.9}, "skip_threshold"),
        ({"decoder": "llada", "steps": 7, "max_tokens": 64, "block_size": 32}, "steps"),
        ({"decoder": "fast-dllm", "cache": "full"}, "cache"),
        ({"echo": True, "suffix": "b"}, "echo"),
    ],
)
def test_bad_settings_are_named(server, fields, param):
    reply = complete(server, model="base", prompt="a", **fields)
    assert reply["status"] == 400 and reply["error"]["param"] == param


@pytest.fixture(scope="module")
def engine(golden):
    made = Engine(golden.params("llada-tiny"), golden.config("llada-tiny"), EngineConfig(1, 128))
    made.buckets = [Bucket(1, 128)]
    made.compile()
    return made


def filled(engine, prompt, decode) -> list[int]:
    engine.reset()
    engine.insert(0, "a", prompt, decode)
    while not (rows := engine.step()) or rows[0].live:
        pass
    return rows[0].tokens[: len(prompt) + decode.max_tokens].tolist()


@pytest.mark.parametrize("decoder", ["fast-dllm", "d2f", "llada"])
def test_suffix_is_filled_towards(server, engine, folder, golden, decoder):
    """The middle alone comes back, what the engine fills between the same ids, plain and streamed alike."""
    mask, words = engine.model.mask_id, load(folder, golden.config("llada-tiny"))
    before, behind = words.encode("Hello "), words.encode(" world", begins=False)
    decode = DecodeConfig(decoder=decoder, max_tokens=0, infill=True)
    middle = filled(engine, [*before, *[mask] * 12, *behind], decode)[len(before) : len(before) + 12]
    stops = [i for i, token in enumerate(middle) if token in words.stop_ids]
    middle = middle[: stops[0]] if stops else middle
    fields = dict(model="base", prompt="Hello ", suffix=" world", max_tokens=12, temperature=0, decoder=decoder)
    reply = complete(server, **fields)
    assert reply["status"] == 200, reply
    assert reply["choices"][0]["text"] == words.decode(middle) and middle
    assert reply["usage"]["completion_tokens"] == len(middle)
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**fields, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
    assert text == reply["choices"][0]["text"]


def test_infill_answers_from_the_first_mask_on(server, engine, folder, golden):
    words = load(folder, golden.config("llada-tiny"))
    prompt = [5, 6, engine.model.mask_id, 7]
    answer = filled(engine, prompt, DecodeConfig(decoder="fast-dllm", max_tokens=0, infill=True))[2:]
    reply = complete(server, model="base", prompt=prompt, infill=True, max_tokens=0, temperature=0)
    assert reply["status"] == 200, reply
    assert reply["choices"][0]["text"] == words.decode(answer)


@pytest.mark.parametrize("decoder", ["d2f", "fast-dllm", "llada"])
def test_a_seed_gives_the_same_text_whoever_else_is_there(server, decoder):
    fields = {"model": "base", "max_tokens": 24, "block_size": 8, "temperature": 1.0, "decoder": decoder}
    ask = lambda k: complete(server, **fields, prompt=[5 + k % 3, 6], seed=k)["choices"][0]["text"]
    alone = [ask(k) for k in range(8)]
    assert len(set(alone)) == 8
    order = [5, 2, 7, 0, 3, 3, 6, 1, 4, 0]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, order)) == [alone[k] for k in order]


@pytest.mark.parametrize("decoder", ["d2f", "fast-dllm", "llada"])
def test_the_last_block_ends_with_the_canvas(server, decoder):  # C2
    """All positions but five are taken, the blocks have eight: five tokens, and the next request is as ever."""
    fields = {"model": "base", "decoder": decoder, "block_size": 8, "ignore_eos": True, "temperature": 0}
    reply = complete(server, **fields, prompt=[5] * 123, max_tokens=5)
    assert reply["status"] == 200, reply
    assert reply["usage"] == {"prompt_tokens": 123, "completion_tokens": 5, "total_tokens": 128}
    assert reply["choices"][0]["finish_reason"] == "length"
    assert complete(server, **fields, prompt=[5] * 123, max_tokens=6)["error"]["code"] == "context_length_exceeded"


def test_what_the_engine_would_refuse_is_refused_at_once(server):
    """400 before it waits for a slot, also for streams; nothing counts as failed."""
    for fields, param in (
        ({"decoder": "llada", "steps": 7, "max_tokens": 64, "stream": True}, "steps"),
        ({"decoder": "fast-dllm", "remasking": "random"}, "steps"),
        ({"infill": True, "stop": ["a"]}, "stop"),
        ({"infill": True, "max_tokens": 0}, "max_tokens"),
    ):
        reply = complete(server, model="base", prompt="a", **fields)
        assert reply["status"] == 400 and reply["error"]["param"] == param, reply
    assert "jdllm_requests_failed_total 0.0" in httpx.get(f"{server.url}/metrics").text
