"""Fixtures that several tests share."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"

from rectified_flow.data.store import ImageDataset
from tests.contract.kinds import Runs
from tests.training.runs import tiny_dataset

# Started in the background of a script, the tests would ignore these, and so would all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


SLOWEST = (
    *("launch/", "test_docs", "test_onnx", "mission/", "examples/", "contract/", "test_fuzz", "test_rooms"),
    *("training/", "test_user_files"),
)
"""Parts of the names of slow files, the slowest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files, so that none is left alone at the end."""
    items.sort(key=lambda item: next((rank for rank, part in enumerate(SLOWEST) if part in item.nodeid), len(SLOWEST)))


class _ByRuns(LoadScopeScheduling):
    """Give all tests that share runs to one process: those of a file, and in tests/contract those of a kind.

    ``--dist loadgroup`` of pytest-xdist 3.8 groups nothing with pytest 9.2, which ignores the changed names of tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return f"{file}[{test.partition('[')[2]}" if file.endswith("test_contract.py") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByRuns(config, log)


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create one cache folder for all processes of the session and for the programs that they start."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's folder is inside the folder of the session
        folder = folder.parent
    folder /= "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECTIFIED_FLOW_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def flowers(cache_dir: Path) -> ImageDataset:
    return tiny_dataset(cache_dir)


@pytest.fixture(scope="session")
def kind_runs(cache_dir: Path) -> Callable[[str], Runs]:
    """The runs of a kind by its name, each trained once in the session."""
    return lambda name: Runs(name, cache_dir.parent / "kinds")


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., Any]]:
    playwright = pytest.importorskip("playwright.sync_api")
    found = [shutil.which(name) for name in ("chromium", "google-chrome")]
    chromium = next(filter(None, found), None) or pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        yield lambda *flags: started.chromium.launch(executable_path=chromium, args=["--no-sandbox", *flags])


@pytest.fixture(scope="session")
def browser(launch: Callable[..., Any]) -> Iterator[Any]:
    with launch() as opened:
        yield opened


SOFTWARE_CARD = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"]


@pytest.fixture(scope="session")
def browser_with_card(launch: Callable[..., Any]) -> Iterator[Any]:
    """Start a browser whose graphics card is emulated by software."""
    with launch(*SOFTWARE_CARD) as opened:
        yield opened
