"""The page at /: its files and headers, and, where Chromium and its driver are installed, what it does."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from jdllm import serving
from jdllm.config import DecodeConfig
from jdllm.decoders import TABLE
from jdllm.serving import playground

FOLDER = Path(serving.__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("playground*") if path.suffix in playground.KINDS)


def test_page_and_files(serve, kit):
    server = serve(kit.says("x"), api_keys=("secret",))
    for name in FILES:
        response = server.http.get("/" if name == "playground.html" else f"/{name}")  # without the key
        assert response.status_code == 200, name
        assert response.content == (FOLDER / name).read_bytes()
        assert response.headers["content-type"].split(";")[0] == playground.KINDS[Path(name).suffix]
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'self'" and "unsafe" not in str(policy)
    assert server.http.get("/playground.py").status_code == 404
    assert not any("playground" in path or path == "/" for path in server.http.get("/openapi.json").json()["paths"])


def test_files_are_in_the_wheel():
    setup = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["jdllm.serving"]
    assert {"playground.html", "playground.css", "playground.js"} <= set(FILES)
    for name in FILES:
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_nothing_comes_from_or_goes_elsewhere():
    """No address of another server; every file that is named exists; model text never becomes markup."""
    named = set()
    for name in FILES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?|wss?|ftp):|[\"'(]//|@import|url\(", text), name
        assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|Function\(", text), name
        assert not re.search(r"\sstyle=|\son\w+=", text), f"{name}: the page's policy refuses these"
        named |= set(re.findall(r"(?:src=|href=|from )\"(?:\./)?([\w.]+)\"", text))
    assert named | {"playground.html"} == set(FILES)


def test_what_the_form_is_made_of(serve, kit):
    """Every decoder of the model's family with what it reads, each setting with a kind, a default and a hint."""
    server = serve(kit.says("x"), defaults={"block_size": 16, "max_tokens": 40}, api_keys=("secret",))
    about = server.http.get("/playground.json").json()
    assert about["not_ready"] is None and about["family"] == "llada" and about["max_length"] == 128
    assert set(about["decoders"]) == {name for name, family in TABLE if family == "llada"}
    for name, settings in about["decoders"].items():
        assert set(settings) == set(playground.COMMON) | TABLE[name, "llada"].settings
    assert about["models"] == {name: {"block_size": 16, "max_tokens": 40} for name in ("tiny", "org/alias")}
    kinds = {name: setting["kind"] for name, setting in about["settings"].items()}
    assert kinds["steps"] == kinds["block_size"] == "whole" and kinds["skip_threshold"] == kinds["factor"] == "number"
    assert kinds["cache"] == "choice" and kinds["early_stop"] == "flag"
    assert about["settings"]["cache"]["choices"] == ["none", "prefix", "dual"]
    assert about["settings"]["skip_threshold"]["default"] == DecodeConfig.skip_threshold
    read = {setting for decoder in TABLE.values() for setting in decoder.settings}
    assert read | set(playground.COMMON) == set(playground.HINTS)


def test_the_form_waits_for_the_model(serve, kit):
    server = serve(kit.says("x"), open_seconds=0.3, wait=False)
    about = server.http.get("/playground.json").json()
    assert about["not_ready"].startswith("loading") and not about["decoders"] and not about["models"]
    kit.until(lambda: server.http.get("/playground.json").json()["decoders"])


class Browser:
    """Headless Chromium through its driver, which speaks WebDriver's JSON."""

    def __init__(self, url: str, chromium: str, profile: Path):
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
        ).split()
        options = {"binary": chromium, "args": [*flags, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.http = httpx.Client(base_url=url, timeout=60)
        session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.at = f"/session/{session['sessionId']}"
        self.downloads = profile / "downloads"
        self.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def _post(self, path: str, body: dict):
        answer = self.http.post(path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self._post(f"{self.at}/url", {"url": url})

    def run(self, script: str, *args):
        """The value of a JavaScript expression; ``args`` is what it says."""
        return self._post(f"{self.at}/execute/sync", {"script": f"return {script}", "args": args})

    def cdp(self, command: str, **params):
        return self._post(f"{self.at}/goog/cdp/execute", {"cmd": command, "params": params})

    def keys(self, *keys: str) -> None:
        """Press together, release together."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp") for key in keys]
        self._post(f"{self.at}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def put(self, selector: str, value: str) -> None:
        """Fill in a field, as a user does who types or chooses."""
        script = """((field, value) => {
          field.value = value;
          for (const name of ["input", "change"]) field.dispatchEvent(new Event(name, { bubbles: true }));
        })(document.querySelector(arguments[0]), arguments[1])"""
        self.run(script, selector, value)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("[...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def errors(self) -> list[str]:
        """What the console got since the last call."""
        return [entry["message"] for entry in self._post(f"{self.at}/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.http.get(f"{self.at}/screenshot").json()["value"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs Chromium and chromedriver on PATH (Debian: apt install chromium chromium-driver)")
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        assert process.stdout
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        browser = Browser(f"http://127.0.0.1:{port}", chromium, tmp_path_factory.mktemp("profile"))
        stack.callback(browser.http.close)
        stack.callback(lambda: browser.http.delete(browser.at))
        yield browser


@pytest.fixture
def page(browser, kit):
    """page(server): the page of a server, ready for use; at the end its console must be empty."""

    def visit(server) -> Browser:
        browser.open(server.url)
        kit.until(lambda: browser.run("document.querySelector('#model').value") and browser.texts("#settings span"))
        browser.put("#prompt", "Hi")  # the page's example is longer than these canvases
        return browser

    browser.open("about:blank")  # the page before asks its server, which is gone, for numbers every second
    browser.errors()
    yield visit
    assert browser.errors() == []


CONTROL, ENTER, RIGHT, END = "\ue009", "\ue007", "\ue014", "\ue010"
CELLS = ".card:first-child .canvas .cell"


def states(browser: Browser) -> list[str]:
    return browser.texts(".card .state")


def test_a_run_fills_the_canvas(serve, kit, page):
    """Ctrl+Enter; cells out of order, with marks for blanks, their steps, confidences and what lies behind the end."""

    def script(prompt, decode):
        yield [(2, ord("\n"))]
        yield [(0, ord("<")), (3, ord("b")), (4, kit.EOS)]
        yield [(1, ord(" "))]

    server = serve(script)
    browser = page(server)
    browser.put("#max_tokens", "6")
    browser.run("document.querySelector('#prompt').focus()")
    browser.keys(CONTROL, ENTER)
    kit.until(lambda: states(browser) == ["finished: stop"])
    assert browser.run("document.querySelector('.text').textContent") == "< \nb"
    assert browser.texts(f"{CELLS} .token") == ["<", "␣", "⏎", "b", f"⟨{kit.EOS}⟩", ""]
    assert browser.texts(f"{CELLS} .step") == ["2", "3", "1", "2", "2", ""]
    kinds = browser.run(f"[...document.querySelectorAll('{CELLS}')].map((e) => e.className)")
    assert kinds == ["cell"] * 4 + ["cell special beyond", "cell masked"]
    sure = browser.run(f"[...document.querySelectorAll('{CELLS}')].map((e) => e.style.cssText.slice(5, 10))")
    assert sure == ["0.818", "0.740", "0.904", "0.818", "0.818", ""]  # exp(-step / 10)
    stats = browser.texts(".stats dd")
    assert stats[:3] == ["4", "3", "1.33"] and all(re.fullmatch(r"\d+ ms|\d\.\d+ s", s) for s in stats[3:])
    assert browser.texts("#status") == ["Run 1: d2f finished, 4 tokens in 3 steps."]

    # The keyboard walks the canvas, and what a cell is can be read.
    browser.run("document.querySelector('.canvas').focus()")
    browser.keys(RIGHT)
    assert browser.texts(".detail") == ["position 1: “␣”, id 32, confidence 0.741, step 3"]
    browser.keys(END)
    assert browser.texts(".detail") == ["position 5: masked"]

    # The replay goes back to any step.
    browser.put(".replay input", "2")
    assert browser.texts(f"{CELLS} .token") == ["<", "", "⏎", "b", f"⟨{kit.EOS}⟩", ""]
    assert browser.texts(".text") == ["<"] and browser.texts("output") == ["2 of 3"]
    browser.put(".replay input", "3")
    assert browser.texts(".text") == ["< \nb"]
    browser.click(".play")
    kit.until(lambda: browser.texts("output") == ["3 of 3"])


def test_model_text_is_text(serve, kit, page):
    evil = "<img src=x onerror=alert(1)></pre><script>document.title='got'</script>"
    browser = page(serve(kit.says(evil, per_step=9)))
    browser.put("#max_tokens", "90")
    browser.click("#run")
    kit.until(lambda: states(browser) == ["finished: stop"])
    assert browser.texts(".text") == [evil] and browser.run("document.title") == "jdllm playground"
    assert browser.run("document.querySelectorAll('.card img, .card script').length") == 0


def test_decoders_side_by_side_and_export(serve, kit, page):
    """A request each, with the settings that each decoder reads and the same seed; the export holds everything."""
    seen = []

    def script(prompt, decode):
        seen.append(decode)
        return kit.says("Hello, you", per_step=2)(prompt, decode)

    browser = page(serve(script))
    offered = browser.texts("#settings .field span")
    assert "skip_threshold" in offered and "cache" not in offered
    browser.put("#decoder", "fast-dllm")
    offered = browser.texts("#settings .field span")
    assert "skip_threshold" not in offered and "cache" in offered
    browser.put("[data-param=cache]", "dual")
    browser.put("[data-param=threshold]", "0.75")
    browser.put("#max_tokens", "16")
    browser.put("#n", "2")
    browser.click("[name=mode][value=completion]")
    browser.click("#compare")
    kit.until(lambda: states(browser) == ["finished: stop"] * 6)
    assert browser.texts(".card .text") == ["Hello, you"] * 6 and browser.texts("[data-stat=tokens]") == ["10"] * 6
    assert len({(decode.decoder, decode.seed) for decode in seen}) == 6 and len({d.seed for d in seen}) == 2
    assert {(d.cache, d.threshold) for d in seen if d.decoder == "fast-dllm"} == {("dual", 0.75)}

    browser.click(".card:nth-child(5) .export")
    kit.until(lambda: list(browser.downloads.glob("jdllm-run-3.1-fast-dllm.json")))
    exported = json.loads((browser.downloads / "jdllm-run-3.1-fast-dllm.json").read_text())
    assert exported["request"]["decoder"] == "fast-dllm" and exported["request"]["threshold"] == 0.75
    assert exported["text"] == "Hello, you" and exported["tokens"] == 10 and exported["state"] == "finished"
    assert [c["position"] for c in exported["commits"]][:10] == list(range(10))
    assert exported["response"]["usage"]["completion_tokens"] == 20  # of both answers
    assert [h[:5] for h in browser.texts("h2")] == ["Run 1", "Run 1", "Run 2", "Run 2", "Run 3", "Run 3"]
    browser.click("#clear")
    assert browser.texts(".card") == [] and browser.run("document.activeElement.id") == "run"


def test_errors_name_their_field(serve, kit, page):
    browser = page(serve(kit.says("x")))
    browser.put("[data-param=block_size]", "0")
    browser.put("#n", "3")
    browser.click("#run")
    kit.until(lambda: states(browser) == ["failed"])  # one card for all answers
    browser.put("#n", "1")
    assert browser.texts(".error code") == ["block_size"] and "400" in browser.texts(".error")[0]
    assert browser.run("document.querySelector('[aria-invalid]').dataset.param") == "block_size"
    browser.put("[data-param=block_size]", "")
    browser.click("#run")
    kit.until(lambda: states(browser) == ["finished: stop", "failed"])
    assert browser.run("document.querySelector('[aria-invalid]')") is None
    assert all("400 (Bad Request)" in error for error in browser.errors())  # Chromium's own line on the first one


def test_stop_frees_the_slot(serve, kit, page):
    server = serve(kit.says("ab", end=False), step_seconds=0.05)
    browser = page(server)
    browser.put("#max_tokens", "90")
    browser.click("#run")
    kit.until(lambda: states(browser) == ["running"] and len(browser.texts(".text")[0]) > 3)
    kit.until(lambda: browser.texts("[data-chart=slots] b") == ["1 of 4"])
    kit.until(lambda: browser.texts("[data-chart=step] b")[0].endswith(" ms"))
    browser.click(".card .stop")
    kit.until(lambda: states(browser) == ["stopped"] and server.metric("jdllm_requests_running") == 0)
    assert server.metric("jdllm_requests_cancelled_total") == 1
    kit.until(lambda: browser.texts("[data-chart=slots] b") == ["0 of 4"])

    for _ in range(7):  # more than the browser opens connections: the rest waits in the page
        browser.click("#run")
    kit.until(lambda: states(browser)[:7].count("running") == 5 and states(browser)[:7].count("waiting") == 2)
    kit.until(lambda: server.metric("jdllm_requests_running") == 4)
    browser.click("#stop")
    kit.until(lambda: states(browser) == ["stopped"] * 8 and server.metric("jdllm_requests_running") == 0)
    assert server.metric("jdllm_requests_admitted_total") == server.metric("jdllm_requests_cancelled_total") == 6


def test_charts_rest_while_the_page_is_hidden(serve, kit, page):
    browser = page(serve(kit.says("x")))
    asked = lambda: browser.run(
        "performance.getEntriesByType('resource').filter((e) => /metrics$/.test(e.name)).length"
    )
    kit.until(lambda: asked() >= 2)
    browser.run("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    time.sleep(1.1)  # the one that was on its way
    before = asked()
    time.sleep(1.5)
    assert asked() == before
    browser.run("Object.defineProperty(document, 'hidden', { value: false, configurable: true })")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    kit.until(lambda: asked() >= before + 2)


def test_the_key_is_asked_for(serve, kit, browser):
    server = serve(kit.says("yes"), api_keys=("secret",))
    browser.open(server.url)
    kit.until(lambda: browser.run("document.activeElement.id") == "key")
    browser.put("#key", "secret")
    browser.put("#prompt", "Hi")
    kit.until(lambda: browser.texts("#model option") == ["tiny", "org/alias"])
    browser.click("#run")
    kit.until(lambda: states(browser) == ["finished: stop"])
    assert browser.texts(".text") == ["yes"]
    assert browser.run("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    assert all("401 (Unauthorized)" in error for error in browser.errors())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_and_width(serve, kit, page, theme):
    """At 400 pixels nothing is cut off, and text stands out from what is behind it, cells of any confidence too."""
    browser = page(serve(kit.says("Hello there", per_step=3)))
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.cdp("Emulation.setDeviceMetricsOverride", **size)
    try:
        while browser.texts("#theme") != [f"Theme: {theme}"]:
            browser.click("#theme")
        browser.click("#compare")
        kit.until(lambda: states(browser) == ["finished: stop"] * 3)
        assert browser.run("document.documentElement.scrollWidth") <= 400
        wide = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 400).length"
        assert browser.run(wide) == 0
        assert browser.run(CONTRAST) >= 4.5
    finally:
        browser.cdp("Emulation.clearDeviceMetricsOverride")


CONTRAST = """(() => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (...colours) => {
    for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let least = 21;
  for (const e of document.querySelectorAll("body *")) {
    const hasText = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!hasText || !e.checkVisibility() || e.disabled) continue;
    const behind = [];
    for (let p = e; p; p = p.parentElement) behind.unshift(getComputedStyle(p).backgroundColor);
    const [a, b] = [light("white", ...behind, getComputedStyle(e).color), light("white", ...behind)];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
})()"""
