"""Processes that wait for each other say for whom, and a wait at the start has an end."""

import os
import socket
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rectified_flow.distributed import join
from rectified_flow.distributed.join import meet, wait_for
from rectified_flow.errors import RunError
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

BRIEF = timedelta(seconds=1)
SOON = 0.1


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_line_comes_after_each_interval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(join, "INTERVAL", SOON)
    monkeypatch.setattr(join, "POLL", SOON / 10)
    texts = [*["rank 1"] * 60, *[""] * 60]

    assert wait_for(lambda: texts.pop() if texts else None, timedelta(seconds=PATIENCE)) is None
    assert set(capsys.readouterr().err.splitlines()) == {"waiting for rank 1"}, "no line while another rank speaks"
    assert wait_for(lambda: "rank 1", timedelta(0)) == "rank 1"
    assert capsys.readouterr().err == "", "a line before the interval"


def test_the_lowest_rank_that_waits_names_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []

    def once(awaited: Callable[[], str | None], _timeout: timedelta) -> str | None:
        said.append(awaited())
        return said[-1]

    monkeypatch.setattr(join, "wait_for", once)
    store = HashStore()
    for rank in (1, 2, 0):
        with pytest.raises(RunError, match="not all of 4 processes came"):
            meet(store, "start", rank, 4, "to come")
    meet(store, "start", 3, 4, "to come")
    missing = ["ranks 0, 2, 3", "ranks 0, 3", "rank 3"]
    assert said == [f"{missing[0]} (of 4 processes) to come", "", f"{missing[2]} (of 4 processes) to come", None]


def start_alone(rank: int, port: int) -> tuple[str, str, dict[str, str]]:
    """Join as one of two processes whose other one does not come."""
    join.STARTUP_TIMEOUT, join.INTERVAL = BRIEF, SOON
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with redirect_stderr(StringIO()) as written, pytest.raises(RunError) as end:
        join.join_processes()
    return str(end.value), written.getvalue(), dict(os.environ)


def test_rank_0_names_the_rank_that_does_not_come(port: int) -> None:
    [(end, lines, environment)] = run_on_ranks(1, start_alone, 0, port)
    assert f"waiting for rank 1 (of 2 processes) at 127.0.0.1:{port}, where it has not come yet" in lines
    assert "not all of 2 processes came within 0:00:01" in end
    assert environment["LOCAL_RANK"] == "0", "accelerate would find no backend for GPUs"


def test_another_rank_says_that_nothing_answers(port: int) -> None:
    [(end, lines, _)] = run_on_ranks(1, start_alone, 1, port)
    assert f"waiting for rank 0 at 127.0.0.1:{port}, which gives rank 1 on" in lines
    assert "Connection refused" in lines
    assert f"no answer from rank 0 at 127.0.0.1:{port} within 0:00:01" in end


def test_a_failed_connection_names_the_cure(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with ... remote=[127.0.1.1]:4711\nmore")

    monkeypatch.setattr(dist, "init_process_group", fail)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    addresses = {"lo": "127.0.0.1", "eth7": "10.66.0.2"}
    found = {name: [SimpleNamespace(family=socket.AF_INET, address=each)] for name, each in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    with pytest.raises(RunError) as end:
        join._create_group(cpu=True, world_size=1)
    sentence = str(end.value)
    assert "rank 0 on" in sentence
    assert "set GLOO_SOCKET_IFNAME=eth7" in sentence
    assert " resolves to 127.0.1.1 " in sentence
