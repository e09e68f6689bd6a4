"""The panel of an exported page that describes the model: its values are those of the run, and are only ever texts."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rectified_flow.cli.export import export
from rectified_flow.cli.flags.sampling import ExportConfig
from rectified_flow.condition import Labels
from rectified_flow.flags import parse
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE, STATE_FILE, RunIdentity, TrainerFile
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.server import folder_server
from tests.cli.test_export import small
from tests.cli.test_page import looking_at

pytestmark = pytest.mark.page
HTML = "<img src=x onerror=alert(1)>"
FACTS = """() => Object.fromEntries([...document.querySelectorAll("#facts dt")]
  .map((term) => [term.textContent, term.nextElementSibling.textContent]))"""


def write_run(folder: Path) -> RectifiedFlow:
    flow = RectifiedFlow(small(labels=Labels(2, ("cat", HTML))), space=Pixels((3, 8, 8)))
    config = {
        "run": {},
        "data": {"dataset": "", "dataset_path": f"/home/me/{HTML}", "image_size": 8},
        "items": {"training": 18912, "held_out": 12},
    }
    counters = asdict(TrainerFile(7, images_seen=1234, run=RunIdentity("data", 0, 8, "new", "float32")))
    files = {checkpoint.MODEL_FILE: checkpoint.own_weights(flow.network)}
    documents = {FLOW_FILE: describe(flow), CONFIG_FILE: config, STATE_FILE: counters}
    path = checkpoint.save(folder / "checkpoints", 7, files, documents)
    result = {"checkpoint": str(path), "weights": "last weights", "steps": 16, "num_samples": 2000}
    distances = {"fid": 12.3456, "copies": 0.0125}
    (folder / "evaluation.json").write_text(json.dumps([result | {"distances": distances}]))
    return flow


def test_the_page_describes_the_model(tmp_path: Path, browser: Any) -> None:
    flow = write_run(tmp_path)
    sys.argv = ["export.py", "--checkpoint", str(tmp_path), "--format", "page", "--license", "cc-by-4.0"]
    export(parse(ExportConfig, "Export."))
    about = json.loads((tmp_path / "exported/model.json").read_text())["about"]
    with folder_server(tmp_path / "exported", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with looking_at(browser, f"http://127.0.0.1:{server.server_port}/") as shown:
            shown.open()
            page = shown.page
            assert page.locator("#facts").is_hidden()
            page.focus("#card summary")
            page.keyboard.press("Enter")
            parameters = sum(parameter.numel() for parameter in flow.network.parameters())
            assert page.evaluate(FACTS) == {
                "Training data": f"own pictures, {HTML}",
                "Trained on": "18,912 pictures",
                "Held out of the training": "12 pictures",
                "Picture size": "8\u00a0\u00d7\u00a08 pixels",
                "Network": f"{parameters:,} parameters",
                "Training": "7 steps, 1,234 pictures processed",
                "Copies": "1.25% of 2,000 generated pictures in 16 steps",
                "Distance to the data": "12.35 (FID) of 2,000 generated pictures in 16 steps",
                "Licence": "cc-by-4.0",
                "Exported by": f"rectified-flow-trainer {about['version']}",
            }
            assert page.inner_text("#copies").startswith("A copy is a generated picture that is much nearer to ")
            assert page.locator("#condition-labels option").last.inner_text() == HTML
            assert page.locator("img").count() == 0
            assert "/home" not in page.content()
        server.shutdown()
