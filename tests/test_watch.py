"""watch.py: a server that reads the folders of runs while they are written to, and gives nothing else away."""

import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rectified_flow.cli.flags import WatchConfig, WatchedConfig
from rectified_flow.cli.watch import Server, serve, watch
from rectified_flow.errors import UsageError
from rectified_flow.pictures import write_picture
from rectified_flow.runs.curves import POINTS, Curve, Curves
from rectified_flow.runs.watched import WatchedRun, WatchedRuns

ID = "0123456789ab"
ROOT = Path(__file__).resolve().parent.parent


def write_status(folder: Path, state: str = "running", **changes: Any) -> None:
    status = {"state": state, "step": 20, "total_steps": 100, "message": "", "time": now(), "id": ID}
    folder.mkdir(parents=True, exist_ok=True)
    document = {**status, "host": platform.node(), "pid": os.getpid(), **changes}
    (folder / "status.json").write_text(json.dumps(document))


def now(ago: float = 0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - ago))


def add(folder: Path, name: str, *rows: dict[str, Any], end: str = "\n") -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


def metrics(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "images_seen": 8 * step, "loss": 1 / step, "images_per_second": 4.0, "bad_steps": 0, **more}


def begin_run(folder: Path) -> Path:
    """A run of 100 steps of 8 images, at step 30."""
    write_status(folder)
    add(folder, "metrics", metrics(10), metrics(20), metrics(30, bad_steps=2))
    add(folder, "heldout", {"step": 20, "heldout_loss": 0.5, "seen_loss": 0.4, "gap": 0.1, "losses": [0.5]})
    (folder / "samples").mkdir()
    write_picture(folder / "samples" / "step_00000020.png", np.zeros((4, 4, 3), np.uint8))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begin_run(tmp_path / "runs" / "cats")


@contextmanager
def served(*folders: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    with serve(WatchedConfig(folders, host=host, port=18765)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
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


# What a run's folder shows


def test_a_run_that_trains(run: Path) -> None:
    report = WatchedRun(run).report()
    assert (report["state"], report["step"], report["total_steps"]) == ("running", 30, 100)
    assert report["seconds_left"] == 70 * 8 / 4
    assert (report["bad_steps"], report["silent"], report["samples"]) == (2, None, ["step_00000020.png"])
    assert report["curves"]["metrics"]["loss"] == [(10, 0.1), (20, 0.05), (30, 1 / 30)]
    assert report["curves"]["heldout"] == {"heldout_loss": [(20, 0.5)], "seen_loss": [(20, 0.4)], "gap": [(20, 0.1)]}
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"pid": 2**22 + 1}, "died"),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, "running"),
        ({"state": "failed", "message": "no memory"}, "failed"),
        ({"state": "finished"}, "finished"),
        ({"time": "yesterday"}, "running"),
    ],
)
def test_the_state_of_a_run(run: Path, changes: dict[str, Any], state: str) -> None:
    write_status(run, **changes)
    report = WatchedRun(run).report()
    assert report["state"] == state
    assert report["message"] == changes.get("message", "")
    assert (report["seconds_left"] is None) == (state != "running")


def test_a_run_that_is_silent(run: Path) -> None:
    write_status(run, time=now(ago=4000))
    for file in run.glob("*.jsonl"):
        os.utime(file, (time.time() - 3000,) * 2)
    assert WatchedRun(run).report()["silent"] == pytest.approx(3000, abs=60)


def test_it_reads_on_where_it_was(run: Path) -> None:
    watched = WatchedRun(run)
    watched.report()
    add(run, "metrics", {"step": 40, "loss": 0.25}, {"step": 50, "loss": 0.2}, end="")
    assert watched.report()["curves"]["metrics"]["loss"][-1] == (40, 0.25), "the last line is half written"
    add(run, "metrics", end="\n")
    assert watched.report()["curves"]["metrics"]["loss"][-1] == (50, 0.2)


def test_a_file_that_is_replaced_by_a_shorter_one(run: Path) -> None:
    watched = WatchedRun(run)
    watched.report()
    (run / "new").write_text(json.dumps(metrics(10)) + "\n")
    (run / "new").replace(run / "metrics.jsonl")
    assert watched.report()["curves"]["metrics"]["loss"] == [(10, 0.1)]
    (run / "metrics.jsonl").unlink()
    assert watched.report()["curves"]["metrics"] == {}


DAMAGED = {
    **{"empty": "", "null": "null", "list": "[1]", "half": '{"step": ', "no step": '{"loss": 1}'},
    **{"text": '{"step": "1", "loss": 1}', "bytes": "\udcff", "yes": '{"step": 5, "loss": true}'},
    **{"deep": "[" * 100_000, "huge": f'{{"step": {10**30}, "loss": 1}}'},
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_lines_are_left_out(run: Path, line: str) -> None:
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n" + content)
    report = WatchedRun(run).report()
    assert [step for step, _ in report["curves"]["metrics"]["loss"]] == [10, 20, 30]
    assert report["seconds_left"] == 70 * 8 / 4


@pytest.mark.parametrize("loss", [nan, inf, 10**400])
def test_numbers_that_are_none_are_left_out(run: Path, loss: float) -> None:
    add(run, "metrics", metrics(40, loss=loss))
    assert WatchedRun(run).report()["curves"]["metrics"]["loss"][-1][0] == 30


def test_nothing_of_a_run_need_be_there(tmp_path: Path) -> None:
    report = WatchedRun(tmp_path / "nowhere").report()
    assert (report["state"], report["step"], report["total_steps"]) == ("waiting", 0, None)
    write_status(tmp_path / "half")
    (tmp_path / "half" / "status.json").write_text('{"state": "runn')
    assert WatchedRun(tmp_path / "half").report()["state"] == "waiting"


def curve(points: list[tuple[int, float]]) -> Curve:
    made = Curve()
    for step, value in points:
        made.add(step, value)
    return made


def test_long_curves_are_thinned_to_means() -> None:
    points = [(step, float(step % 2)) for step in range(10 * POINTS)]
    assert curve(points[:POINTS]).thinned() == points[:POINTS]
    assert curve(points).thinned() == [(step, 0.5) for step in range(9, 10 * POINTS, 10)]
    assert curve(points[:7]).thinned(3) == [(1, 0.5), (3, 0.5), (6, pytest.approx(1 / 3))]


def test_only_new_lines_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = Curves(run / "metrics.jsonl")
    taken: list[bytes] = []
    monkeypatch.setattr(curves, "_take", taken.append)
    for _ in range(3):
        curves.read_on()
    assert len(taken) == 3


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = (begin_run(tmp_path / "a" / "cats"), begin_run(tmp_path / "b" / "cats"))
    assert [each["name"] for each in WatchedRuns(folders).report()] == ["a/cats", "b/cats"]


def test_a_run_is_shown_once_and_by_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    runs = WatchedRuns((Path(), run, run.parent, Path("../cats")))
    assert [each["name"] for each in runs.report()] == ["cats"]


def test_a_run_that_may_not_be_read_hides_no_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = begin_run(run.parent / "ants")
    stat = os.stat

    def refuse(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if Path(path).parent == secret:
            raise PermissionError
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refuse)
    assert [each["name"] for each in WatchedRuns((run.parent,)).report()] == ["cats"]


# What the server answers


def test_the_page_and_its_parts(run: Path) -> None:
    with served(run) as server:
        for path in ("/", "/index.html", "/watch.mjs", "/chart.mjs", "/watch.css", "/style.css", "/runs.json?now"):
            status, content, headers = get(server, path)
            assert (status, len(content) > 0) == (200, True), path
            assert headers["Content-Security-Policy"].startswith("default-src 'self';")
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert get(server, "/samples/0/step_00000020.png")[:2] == (
            200,
            (run / "samples/step_00000020.png").read_bytes(),
        )


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
    ],
)
def test_nothing_else_has_an_address(run: Path, path: str) -> None:
    secret = run.parent / "secret.png"
    secret.write_bytes(b"secret")
    (run / "samples" / "step_00000030.png").symlink_to(secret)
    os.mkfifo(run / "samples" / "step_00000040.png")
    with served(run) as server:
        assert get(server, path)[0] == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 403), ("", 403), ("10.0.0.1", 403)],
)
def test_only_names_of_this_machine_are_answered(run: Path, host: str, status: int) -> None:
    with served(run) as server:
        assert get(server, "/runs.json", host)[0] == status


def test_who_opens_it_to_others_is_answered_by_any_name(run: Path) -> None:
    with served(run, host="0.0.0.0") as server:
        assert get(server, "/runs.json", "gpu-box:8765")[0] == 200


def test_the_next_port_is_taken(run: Path) -> None:
    with served(run) as one, served(run) as other:
        assert one.server_address[1] != other.server_address[1]


def test_a_browser_that_hangs_up_is_no_error(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(run) as server:
        for number in range(10):
            with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
                connection.sendall(b"GET /style.css HTTP/1.0\r\nHost: localhost\r\n\r\n")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, on close
            assert get(server, "/runs.json")[0] == 200, number
    assert capfd.readouterr().err == ""


def test_all_ports_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rectified_flow.cli.watch.PORTS", 1)
    with served(run) as server:
        port = server.server_address[1]
        with pytest.raises(UsageError, match=f"--port {port} and the 0 after it are taken: pass another"):
            serve(WatchedConfig((run,), port=port))


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is no folder: pass the --output_dir of a run, or a folder of runs"):
        serve(WatchedConfig((tmp_path / "nowhere",)))
    with pytest.raises(UsageError, match="--port is 70000; it must be from 0 to 65535"):
        WatchedConfig(port=70000)
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1 --port 18765 cannot be served"):
        serve(WatchedConfig((tmp_path,), host="192.0.2.1", port=18765))


# The program


def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "watch.py", str(tmp_path), "--port", "18765"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        printed = [program.stdout.readline() for _ in range(3)]
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert printed[0].split() == ["runs", "0", "in", str(tmp_path)]
    assert printed[1].startswith("page        http://127.0.0.1:187")
    assert printed[2] == f"warning: {tmp_path} holds no run yet: pass the --output_dir of a run, or a folder of runs\n"
    assert (program.returncode, "Traceback" in errors) == (0, False)


def test_the_page_is_opened_only_when_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(Server, "serve_forever", lambda _self: None)
    watch(WatchConfig(WatchedConfig((run,), port=18765)))
    assert opened == []
    watch(WatchConfig(WatchedConfig((run,), port=18765, open=True)))
    assert [address.rpartition(":")[0] for address in opened] == ["http://127.0.0.1"]
