"""watch.py: a server that reads the folders of runs while they are written to, and gives nothing else away."""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from rectified_flow.cli.flags.sampling import WatchConfig, WatchedConfig
from rectified_flow.cli.watch import Handler, Server, serve, watch
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse
from tests.patience import PATIENCE
from tests.watched_runs import begin_run, write_status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begin_run(tmp_path / "runs" / "cats")


@contextmanager
def served(*folders: Path, host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    """A server at the given port, or at a free one."""
    with serve(WatchedConfig(folders, host=host, port=port)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:  # else a test that fails would leave a thread for whose end Python waits at exit, forever
            server.shutdown()
            thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    port = server.server_address[1]
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{port}" if host is None else host})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def test_the_page_and_its_parts(run: Path) -> None:
    with served(run) as server:
        for path in (
            "/",
            "/index.html",
            "/watch.mjs",
            "/chart.mjs",
            "/scale.mjs",
            "/watch.css",
            "/style.css",
            "/runs.json?now",
        ):
            status, content, headers = get(server, path)
            assert (status, len(content) > 0) == (200, True), path
            assert headers["Content-Security-Policy"].startswith("default-src 'self';")
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert get(server, "/samples/0/step_00000020.png")[:2] == (
            200,
            (run / "samples/step_00000020.png").read_bytes(),
        )


def test_a_film_needs_two_grids(run: Path) -> None:
    grid = run / "samples/step_00000020.png"
    with served(run) as server:
        for other in (run / "samples").glob("*.png"):
            if other != grid:
                other.unlink()
        assert get(server, "/film/0/film.gif")[0] == 404
        shutil.copy(grid, run / "samples/step_00000050.png")
        status, content, headers = get(server, "/film/0/film.gif")
        assert (status, content[:6], headers["Content-Type"]) == (200, b"GIF89a", "image/gif")
        assert get(server, "/film/1/film.gif")[0] == get(server, "/film/0/other.gif")[0] == 404


def test_runs_that_appear_keep_their_numbers(run: Path, tmp_path: Path) -> None:
    with served(run.parent) as server:
        assert [each["name"] for each in json.loads(get(server, "/runs.json")[1])] == ["cats"]
        write_status(run.parent / "ants")
        (run.parent / "no run").mkdir()
        found = [(each["id"], each["name"]) for each in json.loads(get(server, "/runs.json")[1])]
        assert found == [(0, "cats"), (1, "ants")]
        shutil.rmtree(run)
        assert json.loads(get(server, "/runs.json")[1])[0]["state"] == "waiting"


@pytest.mark.parametrize(
    "path",
    [
        *("/samples/0/../status.json", "/samples/0/..%2fstatus.json", "/samples/0/%2e%2e/status.json"),
        *("/samples/0//etc/passwd", "/samples/0/status.json", "/samples/0/step_1.png/../../status.json"),
        *(f"/samples/{'9' * 5000}/step_00000020.png", "/samples/0/step_00000040.png", "/samples/00/step_00000020.png"),
        *("/samples/9/step_00000020.png", "/samples/-1/step_00000020.png", "/samples/x/step_00000020.png"),
        *("/../pyproject.toml", "/watch.py", "//etc/passwd", "/status.json", "/samples/0/step_00000030.png"),
        *("/samples/0/%00.png", "http://[/", "/samples/0/step_00000020.png/"),
    ],
)
def test_nothing_else_has_an_address(run: Path, path: str) -> None:
    secret = run.parent / "secret.png"
    secret.write_bytes(b"secret")
    (run / "samples" / "step_00000030.png").symlink_to(secret)
    os.mkfifo(run / "samples" / "step_00000040.png")
    with served(run) as server:
        status, _, headers = get(server, path)
        assert status == 404
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403), ("", 403)],
        *[("10.0.0.1", 403), ("[", 403), ("[::1", 403), ("a\tb", 403), ("localhost:x", 200)],
    ],
)
def test_only_names_of_this_machine_are_answered(run: Path, host: str, status: int) -> None:
    with served(run) as server:
        assert get(server, "/runs.json", host)[0] == status


def test_who_opens_it_to_others_is_answered_by_any_name(run: Path) -> None:
    with served(run, host="0.0.0.0") as server:
        assert get(server, "/runs.json", "gpu-box:8765")[0] == 200


def test_the_next_port_is_taken(run: Path) -> None:
    with served(run) as one, served(run, port=one.server_address[1]) as other:
        assert one.server_address[1] != other.server_address[1]


def test_a_browser_that_hangs_up_is_no_error(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(run) as server:
        for number in range(10):
            with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
                connection.sendall(b"GET /style.css HTTP/1.0\r\nHost: localhost\r\n\r\n")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, on close
            assert get(server, "/runs.json")[0] == 200, number
    assert capfd.readouterr().err == ""


def test_a_connection_without_a_request_is_closed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.1)
    with (
        served(run) as server,
        socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=PATIENCE) as connection,
    ):
        connection.sendall(b"GET /runs.json HT")
        assert connection.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_bytes_that_are_no_request_have_no_traceback(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    requests = [b"\0\0\0\0\r\n\r\n", b"GET /\0 HTTP/1.0\r\nHost: localhost\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n"]
    with served(run) as server:
        for request in [*requests, b"GET / HTTP/1.0\r\nHost: \0\r\n\r\n"]:
            with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=PATIENCE) as connection:
                connection.sendall(request)
                assert connection.recv(12)[:12] not in (b"", b"HTTP/1.0 200")
        assert get(server, "/runs.json")[0] == 200
    assert capfd.readouterr().err == ""


def test_who_opens_it_to_others_is_warned(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "serve_forever", lambda _self: None)
    for host, warned in {"0.0.0.0": True, "127.0.0.1": False}.items():
        watch(WatchConfig(WatchedConfig((run,), host=host, port=0)))
        assert ("warning: everyone who can reach this machine" in capsys.readouterr().out) == warned


def test_all_ports_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rectified_flow.system.server.PORTS", 1)
    with served(run) as server:
        port = server.server_address[1]
        with pytest.raises(UsageError, match=f"with ports {port} to {port} cannot be used .*: pass another"):
            serve(WatchedConfig((run,), port=port))


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is not a folder: pass the --output_dir of a run, or a folder"):
        serve(WatchedConfig((tmp_path / "nowhere",)))
    with pytest.raises(UsageError, match="an argument is empty: check whether a variable is unset"):
        parse(WatchConfig, "Watch.", [""])
    with pytest.raises(UsageError, match="--port is 70000; it must be at most 65535"):
        WatchedConfig(port=70000)
    with pytest.raises(UsageError, match=r"host 192\.0\.2\.1 with ports 0 to 0 cannot be used"):
        serve(WatchedConfig((tmp_path,), host="192.0.2.1", port=0))
    for host in ("\udcff", "a" * 5000):
        with pytest.raises(UsageError, match=r"host .* with ports 0 to 0 cannot be used \(.*\): pass another"):
            serve(WatchedConfig((tmp_path,), host=host, port=0))


# The program


def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "watch.py", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        printed = [program.stdout.readline() for _ in range(3)]
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert printed[0].split() == ["runs", "0", "in", str(tmp_path)]
    assert printed[1].startswith("page        http://127.0.0.1:")
    assert printed[2] == f"warning: {tmp_path} holds no run yet: pass the --output_dir of a run, or a folder of runs\n"
    assert (program.returncode, "Traceback" in errors) == (0, False)


def test_the_page_is_opened_only_when_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(Server, "serve_forever", lambda _self: None)
    watch(WatchConfig(WatchedConfig((run,), port=0)))
    assert opened == []
    watch(WatchConfig(WatchedConfig((run,), port=0, open=True)))
    assert [address.rpartition(":")[0] for address in opened] == ["http://127.0.0.1"]
