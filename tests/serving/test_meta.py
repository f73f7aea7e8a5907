"""What is asked about the server itself: models, tokenizer, request ids, metrics."""

import json
import re
from pathlib import Path


def test_models_and_meta(api):
    models = api.http.get("/v1/models").json()
    assert models["object"] == "list" and [m["id"] for m in models["data"]] == ["tiny", "org/alias"]
    assert set(models["data"][0]) == {"id", "object", "created", "owned_by", "root", "max_model_len"}
    assert api.http.get("/v1/models/org/alias").json()["id"] == "org/alias"
    assert api.chat(model="org/alias").json()["model"] == "org/alias"
    assert api.http.get("/version").json()["version"]
    assert "version=0.0.4" in api.http.get("/metrics").headers["content-type"]


def test_tokenizer_endpoints(api, kit):  # F6
    tokens = api.http.post("/tokenize", json={"prompt": "Hi"}).json()
    assert tokens["tokens"] == [72, 105] and tokens["count"] == 2
    chat = api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    assert chat[:2] == [kit.BOS, kit.SOH]
    assert api.http.post("/detokenize", json={"tokens": [72, 105, kit.EOS]}).json() == {"prompt": "Hi"}
    assert api.http.get("/tokenizer_info").json()["eos_token"] == "<|endoftext|>"


def test_a_chat_is_tokenized_with_its_answers_beginning_or_refused(api):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert api.http.post("/tokenize", json={**chat, "add_generation_prompt": True}).status_code == 200
    refused = api.http.post("/tokenize", json={**chat, "add_generation_prompt": False})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "add_generation_prompt"


def test_no_page_loads_scripts_from_elsewhere(api):
    assert [api.http.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


def test_request_ids(api):
    assert api.http.get("/health", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert api.http.get("/nowhere", headers={"X-Request-ID": "abc-2"}).headers["x-request-id"] == "abc-2"
    assert len(api.http.get("/health", headers={"X-Request-ID": "x" * 500}).headers["x-request-id"]) == 32


def test_metrics_have_vllms_names_too(serve, kit):
    """The same numbers under the names that dashboards know, with the model's name; tokens and passes for tokens a
    pass; the share of slots in use."""
    server = serve(kit.says("abcd"))
    for _ in range(3):
        server.chat(max_tokens=8)
    text = server.http.get("/metrics").text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 3.0' in text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{model_name="tiny"}} 0.0' in text
    for ours, theirs in (("generation_tokens", "generation_tokens"), ("prompt_tokens", "prompt_tokens")):
        assert server.metric(f"jdllm_{ours}_total") == server.metric(f"vllm:{theirs}_total") > 0
    assert server.metric("vllm:time_to_first_token_seconds_count") == 3
    assert server.metric("vllm:e2e_request_latency_seconds_count") == 3
    assert server.metric("jdllm_forward_passes_total") > 0
    assert server.metric("jdllm_committed_tokens_total") == server.metric("jdllm_generation_tokens_total")
    assert 'jdllm_step_seconds_count{bucket="1x8"}' in text
    assert 'jdllm_step_cost_seconds{bucket="1x8"} 0.0' in text


def test_idle_time_does_not_lie_between_steps(serve, kit):
    """One request after the other: before the first step of each the server was idle."""
    server = serve(kit.says("abcdef"))
    for _ in range(3):
        server.chat(max_tokens=8)
    assert server.metric("jdllm_between_steps_seconds_count") == server.metric("jdllm_steps_total") - 3 > 0


def test_the_dashboard_reads_metrics_that_are_there(serve, kit):
    """Every name in docs/grafana-dashboard.json is on /metrics."""
    server = serve(kit.says("abcd"))
    server.chat(max_tokens=8)
    text = server.http.get("/metrics").text
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"jdllm_\w+", expression)}
    assert len(names) > 15
    assert not {name for name in names if f"# TYPE {name} " not in text and f"\n{name}" not in text} - {
        "jdllm_requests_rejected_total"  # appears with the first refusal
    }


def test_a_model_is_found_by_its_exact_name(api):
    for name in ("Tiny", "tiny ", "tin", "org", "alias", "org/alias/", ""):
        for refused in (api.chat(model=name), api.complete("a", model=name)):
            error = refused.json()["error"]
            assert refused.status_code == 404 and error["code"] == "model_not_found" and error["param"] == "model"
            assert "tiny, org/alias" in error["message"]
    unknown = api.http.get("/v1/models/org/other")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
