"""Two "machines": network namespaces of this one, with hostnames, hosts files and a network interface of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("rf-0", "rf-1")
HOSTS = ("node-0", "node-1")
ADDRESSES = ("10.66.0.1", "10.66.0.2")
INTERFACE = "eth0"
EVERY_NAME = "".join(f"{address} {host}\n" for address, host in zip(ADDRESSES, HOSTS, strict=True))
ENTER = """
hostname "$0"
exec "$@"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Process:
    """A command on one of the machines, and its output."""

    def __init__(self, popen: "subprocess.Popen[bytes]", log: Path) -> None:
        self.popen, self.log = popen, log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s: {self.output[-2000:]}") from None

    def kill(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)


class Rig:
    """A context in which both machines exist.

    Args:
        lab: an empty folder, which both see.
    """

    def __init__(self, lab: Path) -> None:
        self.lab = lab
        self._count = 0

    def __enter__(self) -> "Rig":
        for namespace in NAMESPACES:
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        other_end = ("peer", "name", INTERFACE, "netns", NAMESPACES[1])
        ip("-n", NAMESPACES[0], "link", "add", INTERFACE, "type", "veth", *other_end)
        for namespace, address in zip(NAMESPACES, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
        self.plug_in()
        self._name_hosts()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        for namespace in NAMESPACES:
            ip("netns", "del", namespace)
            for file in (folder := Path("/etc/netns") / namespace).iterdir():
                file.unlink()
            folder.rmdir()

    def _name_hosts(self) -> None:
        """Write the hosts file of each machine."""
        for namespace in NAMESPACES:
            folder = Path("/etc/netns") / namespace
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{EVERY_NAME}")

    def plug_in(self) -> None:
        for namespace in NAMESPACES:
            ip("-n", namespace, "link", "set", INTERFACE, "up")

    def cut_cable(self) -> None:
        ip("-n", NAMESPACES[0], "link", "set", INTERFACE, "down")

    def start(self, machine: int, command: Sequence[object], variables: Mapping[str, str] | None = None) -> Process:
        """Start a command on a machine."""
        self._count += 1
        log = self.lab / f"{self._count:03}-{HOSTS[machine]}.log"
        given = {"OMP_NUM_THREADS": "1", "RECTIFIED_FLOW_CACHE": str(self.lab / f"cache-{machine}")}
        given |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        enter = ["ip", "netns", "exec", NAMESPACES[machine], "unshare", "--uts", "bash", "-c", ENTER]
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [*enter, HOSTS[machine], *map(str, command)],
                cwd=ROOT,
                env={**os.environ, **given, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Process(popen, log)

    def kill_all(self) -> None:
        """Kill whatever still runs on the machines."""
        for namespace in NAMESPACES:
            listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
            for number in listed.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Afterwards, nothing runs, and the cable is plugged in."""
        try:
            yield
        finally:
            self.kill_all()
            self.plug_in()


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Poll; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"after {seconds:.0f} s, not yet {what}"
        time.sleep(0.05)
    return time.monotonic() - began
