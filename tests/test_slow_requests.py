"""Half, endless and huge requests to every HTTP endpoint of a run: none of them makes another request wait.

The other endpoints are Unix sockets in a folder of their owner (`orchestrator/test_worker_server.py`) and Ray's.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.orchestrator.insight.report.folders import write_run
from troupe.orchestrator.insight.watch import WatchServer
from troupe.orchestrator.telemetry.sinks import PrometheusSink
from troupe.workers.agents.environments.gateway.endpoint import AgentEndpoint

HALF = 60
Served = tuple[int, str, dict[str, str]]
"""Port, and path and headers of a request that is answered with 200."""
Serve = Callable[[Path], AbstractContextManager[Served]]


@contextmanager
def watch(folder: Path) -> Iterator[Served]:
    with WatchServer([write_run(folder / "run", steps=1, tokens=0)], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1], "/data.json", {}
        server.shutdown()


@contextmanager
def prometheus(folder: Path) -> Iterator[Served]:
    sink = PrometheusSink("run", "127.0.0.1", 0)
    sink.write(1, {"reward/mean": 0.5})
    yield sink.port, "/metrics", {}
    sink.close()


@contextmanager
def gateway(folder: Path) -> Iterator[Served]:
    loop, endpoint = asyncio.new_event_loop(), AgentEndpoint()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result(60)
    yield int(url.rpartition(":")[2]), "/v1/models", {"Authorization": f"Bearer {endpoint.key}"}

    async def close() -> None:
        await endpoint.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # of half requests
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def answered(served: Served) -> bool:
    port, path, headers = served
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    return connection.getresponse().status == 200


def sent(port: int, head: bytes, megabytes: int = 0) -> bytes:
    """The first line of the answer to a request, empty if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(head)
            for _ in range(megabytes):
                connection.sendall(bytes(2**20))
            return connection.recv(2**16).partition(b"\r\n")[0]
        except (BrokenPipeError, ConnectionResetError):
            return b""


@pytest.mark.parametrize("serve", [watch, prometheus, gateway])
def test_half_requests_make_no_other_one_wait(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path) as served, ExitStack() as opened:
        for number in range(HALF):
            half = opened.enter_context(socket.create_connection(("127.0.0.1", served[0]), timeout=60))
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "[: number % 40])
        assert answered(served)


@pytest.mark.parametrize("serve", [watch, prometheus, gateway])
def test_huge_requests_are_refused(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        port, path, headers = served
        own = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        line = f"GET /{'x' * 2**20} HTTP/1.1\r\nHost: 127.0.0.1\r\n{own}\r\n".encode()
        header = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{own}X: {'x' * 2**20}\r\n\r\n".encode()
        for head in (line, header):
            assert b" 4" in (answer := sent(port, head)) or not answer, answer[:100]
        length = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{own}Content-Length: {2**40}\r\n\r\n"
        answer = sent(port, length.encode(), megabytes=20)
        assert not answer or answer.split()[1] != b"500", answer
        assert answered(served)
