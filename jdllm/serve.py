"""python -m jdllm.serve: an OpenAI-compatible server for one checkpoint.

A request without ``max_tokens`` gets the checkpoint's default, else DecodeConfig's, cut to the room behind its prompt.
/health answers from the first moment, /ready once everything is compiled. SIGTERM and Ctrl-C let running requests end
(at most --grace seconds); a second one ends at once.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jdllm import runtime
from jdllm.config import ConfigError
from jdllm.runtime import UsageError
from jdllm.serving import logs
from jdllm.serving.schedulers import POLICIES, Policy, parse

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from jdllm.serving.api import ServerConfig
    from jdllm.serving.loop import EngineLoop
    from jdllm.serving.model import ServedModel

log = logging.getLogger("jdllm.serving")

UNREAD_SECONDS = 60.0
"""After these the kernel gives up a connection whose peer takes nothing of what was sent. Without it the socket of a
stream that was ended because nobody reads it (ServerConfig.patience) stays until its peer leaves."""

NICENESS = 10
"""Of the clients' thread above the others', where the model computes on the same processors: one that it takes from
XLA's threads keeps the whole step waiting, while of its own work none is due before the next step. Not more, so that
/health is answered on a machine that others keep busy, too."""


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; the exit code."""
    args = _parser().parse_args(argv)
    logs.install(args.log_format)
    try:
        folder, template, listener = _preflight(args)
        settings = runtime.configure(args.memory_fraction, args.compile_cache)
    except UsageError as error:
        print(f"jdllm.serve: {error}", file=sys.stderr)
        return 2
    log.info("jdllm serves %s", folder)
    log.info("environment: %s", " ".join(f"{name}={value}" for name, value in settings.items()))
    if listener is None:
        return _warm(args, folder, template)
    with asyncio.Runner(loop_factory=event_loops()) as runner:
        code = runner.run(_serve(args, folder, template, listener))
    # A thread inside the compiler cannot be joined, and must not be there when the interpreter is taken down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jdllm.serve", description="OpenAI-compatible server.")
    add = parser.add_argument
    add("--model", help="folder of a converted checkpoint; default: the model that comes with jdllm")
    add("--adapter", action="append", default=[], metavar="NAME=DIR", help="LoRA beside the weights, served as NAME")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 picks a free one")
    add("--max-rows", type=int, default=16, help="requests decoded at once (default 16)")
    add("--max-length", type=int, help="prompt and answer together, in tokens (default: the model's, at most 1024)")
    add("--steps-per-dispatch", type=int, default=1, help="denoising steps a device call (default 1)")
    add("--dtype", choices=runtime.DTYPES, help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--served-model-name", nargs="+", metavar="NAME", help="names to serve under; default: the folder's")
    add("--chat-template", metavar="FILE", help="Jinja template in place of the checkpoint's")
    add("--trust-remote-code", action="store_true", help="run Python code that a checkpoint brings for its tokenizer")
    text = f"who leaves the queue when: {', '.join(POLICIES)}, with settings as in fixed-fill,size=8 (default slot)"
    add("--scheduler", type=_scheduler, default="slot", metavar="NAME[,SETTING=VALUE]", help=text)
    add("--queue-limit", type=int, default=256, help="requests that may wait (default 256)")
    add("--api-key", action="append", metavar="KEY", help="clients must send one; default: $JDLLM_API_KEY, if set")
    add("--cors-origin", action="append", default=[], metavar="URL", help="origin of web pages that may ask, * for all")
    add("--strict-api", action="store_true", help="refuse unknown request fields instead of ignoring them")
    add("--memory-fraction", type=float, help="share of the accelerator's memory to take")
    add("--compile-cache", help=f"folder of compiled programs, '' for none (default {runtime.default_cache()})")
    add("--warm-only", action="store_true", help="compile every program into the compile cache, then exit")
    add("--max-body", type=int, default=2 << 20, metavar="BYTES", help="of a request (default 2097152)")
    add("--log-format", choices=logs.FORMATS, default="text", help="json: one object a line (default text)")
    add("--log-content", action="store_true", help="prompts and answers stand in the log, too")
    add("--grace", type=float, default=30.0, help="seconds that running requests get at the end (default 30)")
    return parser


def _preflight(args: argparse.Namespace) -> tuple[Path, str | None, socket.socket | None]:
    """Everything that can be wrong with the command line, found before anything slow begins: the model's folder, the
    chat template, and where the server listens; None where it will not serve."""
    least_of = {"max_rows": 1, "steps_per_dispatch": 1, "max_length": 2, "queue_limit": 0, "grace": 0, "max_body": 1}
    for name, least in least_of.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')}: {value} must be at least {least}")
    if "" in (args.api_key or ()):
        raise UsageError("--api-key: is empty; leave the flag out to let everyone in")
    if args.warm_only and args.compile_cache == "":
        raise UsageError("--warm-only: has nowhere to keep the programs with an empty --compile-cache")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port: {args.port} must be from 0 to 65535")
    folder = runtime.model_folder(args.model)
    if taken := {*(args.served_model_name or [folder.name])} & runtime.adapter_folders(args.adapter).keys():
        raise UsageError(f"--adapter: {taken.pop()} is the name of the model itself")
    template = None
    if args.chat_template:
        try:
            template = Path(args.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template: cannot read {args.chat_template}: {error}") from None
    return folder, template, None if args.warm_only else _listen(args)


def _listen(args: argparse.Namespace, unread_seconds: float = UNREAD_SECONDS) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=2048)
        # Accepted connections inherit it. (asyncio sets it only on sockets made with a protocol number.) Without it an
        # answer on a connection that is kept alive waits 40 ms for the client to acknowledge the last.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * unread_seconds))
    except OSError as error:
        raise UsageError(
            f"--host {args.host} --port {args.port}: cannot listen there: {error.strerror or error}"
        ) from None
    return listener


def _open(
    args: argparse.Namespace, folder: Path, template: str | None, progress: Callable[[str], None]
) -> "ServedModel":
    """Load the checkpoint; belongs to the thread that will run it."""
    from jdllm.serving.model import open_model

    return open_model(
        folder,
        progress,
        max_rows=args.max_rows,
        max_length=args.max_length,
        steps_per_dispatch=args.steps_per_dispatch,
        dtype=args.dtype,
        chat_template=template,
        trust_remote_code=args.trust_remote_code,
        adapters=runtime.adapter_folders(args.adapter),
    )


def _warm(args: argparse.Namespace, folder: Path, template: str | None) -> int:
    begin = time.monotonic()
    try:
        _open(args, folder, template, log.info).new_engine(log.info)
    except (ConfigError, UsageError, OSError) as error:
        print(f"jdllm.serve: {error}", file=sys.stderr)
        return 1
    log.info("every program is compiled, %.1f s", time.monotonic() - begin)
    return 0


async def _serve(args: argparse.Namespace, folder: Path, template: str | None, listener: socket.socket) -> int:
    import uvicorn

    from jdllm.serving.api import ServerConfig, create_app

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are set below: they drain first, and the process ends with 0

    adapters = runtime.adapter_folders(args.adapter)
    config = ServerConfig(
        names=(*(args.served_model_name or [folder.name]), *adapters),
        root=str(folder),
        queue_limit=args.queue_limit,
        api_keys=_api_keys(args.api_key),
        cors_origins=tuple(args.cors_origin),
        strict_api=args.strict_api,
        max_body=args.max_body,
        log_content=args.log_content,
    )
    url = _url(listener)
    loop = asyncio.get_running_loop()
    failed = asyncio.Event()
    begin = time.monotonic()
    seen_ready = False
    clients_thread = threading.get_native_id()

    def on_change(engine: "EngineLoop") -> None:
        nonlocal seen_ready
        if engine.state == "failed":
            log.critical("the engine has failed: %s", engine.failure, exc_info=_unexpected(engine.failure))
            if not seen_ready:
                loop.call_soon_threadsafe(failed.set)
        elif not seen_ready:
            seen_ready = True
            if engine.model and engine.model.on_processors:
                give_way(clients_thread)
            log.info("ready after %.1f s at %s; try:\n%s", time.monotonic() - begin, url, _example(url, config))

    app = create_app(
        config,
        lambda progress: _open(args, folder, template, progress),
        on_change,
        args.scheduler,
    )
    engine: EngineLoop = app.state.engine_loop
    server = Server(http_config(app, grace=5))
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            server.should_exit = server.force_exit = True
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    log.info("listening at %s; /ready tells when requests are taken", url)

    async def serve_http() -> str | None:
        try:
            await server.serve([listener])
        except (Exception, SystemExit) as error:  # uvicorn leaves through sys.exit when its startup fails
            return f"{type(error).__name__}: {error}"
        return None

    serving = asyncio.ensure_future(serve_http())
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, failed)]
    await asyncio.wait((serving, *waits), return_when=asyncio.FIRST_COMPLETED)
    unasked = serving.done() and not stop.is_set() and not failed.is_set()
    if stop.is_set():
        log.info("draining: running requests have %.0f s", args.grace)
        engine.drain()
        end = time.monotonic() + args.grace
        while not (engine.idle or server.should_exit or time.monotonic() > end):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.stop)  # who is left gets an error, not a closed connection
    server.should_exit = True
    problem = await serving
    if problem or unasked:
        what = "has ended by itself" if server.started else "could not start"
        log.critical("the server at %s %s: %s", url, what, problem or "no reason given")
        return 1
    return 1 if failed.is_set() else 0


def http_config(app: "FastAPI", grace: int) -> "uvicorn.Config":
    """How HTTP is spoken. ``grace``: seconds that open connections have at the end."""
    import uvicorn

    from jdllm.serving.gathered import GatheringProtocol

    return uvicorn.Config(
        app.state.front, http=GatheringProtocol, log_config=None, access_log=False, timeout_graceful_shutdown=grace
    )


def event_loops() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it exists (not on Windows); it takes less of the time that the model needs."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def give_way(thread: int) -> None:
    """Let a thread, by its native id, come behind those of ordinary priority. On Linux: elsewhere threads have none of
    their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it, and it is only for speed
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _scheduler(text: str) -> Policy:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _api_keys(given: list[str] | None) -> tuple[str, ...]:
    return tuple(key for key in given or [os.environ.get("JDLLM_API_KEY", "")] if key)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _example(url: str, config: "ServerConfig") -> str:
    key = " -H 'Authorization: Bearer ...'" if config.api_keys else ""
    body = f'{{"model": "{config.names[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"


def _unexpected(error: BaseException | None) -> BaseException | None:
    """The error, if its traceback says more than its text."""
    return None if isinstance(error, ConfigError | UsageError | OSError) else error


if __name__ == "__main__":
    sys.exit(main())
