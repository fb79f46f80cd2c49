"""`troupe watch`: what its server answers, and to whom."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrator.insight.report.folders import RECORDED, write_run
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.watch import WatchServer, refusal


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    """A server of a run with three steps."""
    with WatchServer([write_run(tmp_path / "run", steps=3, tokens=0)], 0) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving
        serving.shutdown()


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    """Status, content and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_it_listens_on_loopback_only(server: WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_and_its_data(server: WatchServer) -> None:
    status, page, headers = ask(server, "/")
    assert status == 200 and '"live":true' in page
    assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"
    data = json.loads(ask(server, "/data.json")[1])
    assert data["runs"][0]["metrics"]["reward/mean"]["steps"] == [1, 2, 3]
    assert [*data["samples"][0]["stamps"]] == ["1", "2", "3"] and data["samples"][0]["blocks"] == []
    assert json.loads(ask(server, "/samples.json?run=0&step=1")[1])["step"] == 1
    assert ask(server, "/samples.json?run=1&step=1")[0] == 404


def test_nothing_is_sent_again_until_the_run_has_written(server: WatchServer, tmp_path: Path) -> None:
    mark = json.loads(ask(server, "/data.json")[1])["mark"]
    assert ask(server, f"/data.json?mark={mark}")[:2] == (204, "")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write((RECORDED / "healthy-ppo.jsonl").read_text().splitlines()[3] + "\n")
    assert json.loads(ask(server, f"/data.json?mark={mark}")[1])["runs"][0]["steps_done"] == 4


def test_requests_by_another_name_or_from_another_site_are_refused(server: WatchServer) -> None:
    for path in ("/", "/data.json", "/samples.json?step=1"):
        assert ask(server, path, Host="rebound.example")[0] == 403
        assert ask(server, path, Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, "/", Host=f"localhost:{server.server_address[1]}", Sec_Fetch_Site="none")[0] == 200


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        *(("127.0.0.1:8300", True), ("localhost", True), ("[::1]:1", True), ("127.0.0.1.evil.example", False)),
        *(("[", False), ("[::1", False), ("a]:1", False)),
        *(("", False), ("10.0.0.7:8300", False), ("localhost.evil.example:8300", False), ("evil@localhost", True)),
    ],
)
def test_names_of_this_machine(host: str, fine: bool) -> None:
    assert (refusal(host, "") == "") is fine


def test_it_reads_only(server: WatchServer, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(server, "/data.json", method)[0] == 501
    status, content, headers = ask(server, "/", "HEAD")
    assert (status, content) == (200, "") and int(headers["Content-Length"]) > 10_000
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    "path", ["/spec.yaml", "/../../etc/passwd", "/trajectories/", "/%2e%2e/spec.yaml", "/index.html"]
)
def test_it_serves_no_files(server: WatchServer, path: str) -> None:
    assert ask(server, path)[:2] == (404, "no such page\n")


@pytest.mark.parametrize("query", ["run=x&step=1", "step=", "run=7&step=1", "run=-1&step=1", "step=99"])
def test_what_is_not_there_is_an_answer_and_no_failure(server: WatchServer, query: str) -> None:
    assert ask(server, f"/samples.json?{query}")[0] in {400, 404}


def test_a_port_that_is_taken_is_named(server: WatchServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--port"):
        WatchServer([tmp_path / "run"], server.server_address[1])
