"""Tests of the server of the page."""

import asyncio
import urllib.request
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rectified_flow.studio import jobs, serve
from rectified_flow.studio.flags import PageConfig

gradio = pytest.importorskip("gradio")
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """The address of a studio that was started beside the folder ``runs``."""
    for name in ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED"):
        monkeypatch.setenv(name, "")  # put back at the end
    monkeypatch.chdir(tmp_path)
    serve.open_page(PageConfig(Path("runs"), open=False))
    yield capsys.readouterr().out.split()[1]
    gradio.close_all()


def test_no_file_is_a_page_at_the_address_of_the_studio_except_for_exports(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr(jobs, "_start_process", lambda job: (job.folder / jobs.PROCESS).touch())
    jobs.start(runs, "page", "cats", ["export", str(runs / "cats/page")])
    dropped, uploaded, exported = "pictures/page/e.html", ".studio/uploads/ab/e.html", "cats/page/index.html"
    for name in (dropped, uploaded, exported):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_text(SCRIPT)

    def policy(name: str, form: str = "file=") -> str | None:
        with urllib.request.urlopen(f"{address}gradio_api/{form}{quote(str(runs / name))}") as answer:
            assert answer.read().decode() == SCRIPT
            return answer.headers["Content-Security-Policy"]

    assert policy(exported) is None
    for name in (dropped, uploaded, f"cats/page/../../{dropped}"):
        assert policy(name) == "sandbox"
        assert policy(name, "file/") == "sandbox"
    with urllib.request.urlopen(address) as answer:
        assert answer.headers["Content-Security-Policy"] is None


@pytest.mark.parametrize("path", ["/gradio_api/upload", "/gradio_api/queue/join"])
def test_a_disk_too_full_for_dropped_files_is_a_sentence(tmp_path: Path, path: str) -> None:
    async def app(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    answers = list[dict[str, Any]]()

    async def send(message: Any) -> None:
        answers.append(message)

    answer = serve.sandboxed(app, tmp_path)({"type": "http", "path": path}, None, send)
    if not path.endswith("upload"):
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(answer)
        return
    asyncio.run(answer)
    assert answers[0]["status"] == 507
    sentence = b"the files cannot be written (No space left on device): make room on the disk, and drop them again"
    assert answers[1]["body"] == sentence


def test_jobs_are_asked_for_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A studio that is started in another folder finds them."""
    from rectified_flow.studio import page

    def build(runs: Path) -> None:
        assert runs == tmp_path / "runs"
        raise KeyboardInterrupt

    for name in ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(page, "build", build)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        serve.open_page(PageConfig(Path("runs"), open=False))
