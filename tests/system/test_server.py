"""Servers of a folder for a browser on this machine."""

import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from rectified_flow.errors import UsageError
from rectified_flow.system import server as module
from rectified_flow.system.server import folder_server


def test_a_folder_is_served_at_the_first_free_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page/index.html").write_text("hello")
    (tmp_path / "secret").write_text("secret")
    with folder_server(tmp_path / "page", 0) as server, folder_server(tmp_path, server.server_address[1]) as other:
        assert other.server_address[1] > server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            host, port = server.server_address[:2]
            assert host == "127.0.0.1"
            assert urlopen(f"http://{host!s}:{port}/").read() == b"hello"
            for path in ("../secret", "..%2fsecret", "secret"):
                with pytest.raises(HTTPError, match="404"):
                    urlopen(f"http://{host!s}:{port}/{path}")
        finally:
            server.shutdown()
            thread.join()
        monkeypatch.setattr(module, "PORTS", 1)
        with pytest.raises(
            UsageError, match=r"cannot be used .*: stop a server on one of these ports, or leave out --open"
        ):
            folder_server(tmp_path, port)
