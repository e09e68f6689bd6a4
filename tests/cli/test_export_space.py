"""An exported page as a Space, uploaded to a hub on this machine that speaks the protocol of huggingface_hub."""

import base64
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import SpaceCard, constants

from rectified_flow.cli.exports.space import HubSpace, find_space, publish, readme
from rectified_flow.cli.flags.sampling import ExportedConfig
from rectified_flow.errors import RunError, UsageError
from tests.cli.test_export import export_page
from tests.programs import assert_refused

COMMIT = "0123456789" * 4
HIDDEN = "me/hidden"
"""A repository that exists, and that the token may not read."""
LARGE = (".onnx", ".wasm")
"""Files that go into the large file storage."""


class Hub(ThreadingHTTPServer):
    """Repositories of the owner ``me``, for the access token ``good``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, Any]] = {
            "me/model": {"id": "me/model", "cardData": {"license": "cc-by-4.0"}}
        }
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.failing = ""


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer_to(b"")

    def do_POST(self) -> None:
        self.answer_to(self.rfile.read(int(self.headers["Content-Length"])))

    def do_PUT(self) -> None:
        self.server.large[self.path.removeprefix("/lfs/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {})

    def answer(self, status: int, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(content)

    def answer_to(self, body: bytes) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        status, document = 200, dict[str, Any]()
        if self.headers["Authorization"] != "Bearer good":
            status = 401
        elif hub.failing and hub.failing in path:
            status = 408
        else:
            match path.strip("/").split("/"):
                case ["api", "spaces" | "models", owner, name]:
                    document = hub.repositories.get(f"{owner}/{name}", {})
                    status = 200 if document else 404
                case ["api", "repos", "create"]:
                    status, document = self.create(**json.loads(body))
                case ["api", "validate-yaml"]:
                    document = {"errors": [], "warnings": []}
                case ["api", "spaces", _, _, "preupload", "main"]:
                    names = [each["path"] for each in json.loads(body)["files"]]
                    modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
                    files = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
                    document = {"files": files}
                case ["spaces", _, _, "info", "lfs", "objects", "batch"]:
                    objects = json.loads(body)["objects"]
                    for each in objects:
                        each["actions"] = {"upload": {"href": f"{hub.address}/lfs/{each['oid']}"}}
                    document = {"transfer": "basic", "objects": objects}
                case ["api", "spaces", owner, name, "commit", "main"]:
                    document = self.commit(f"{owner}/{name}", body)
                case _:
                    status = 500
        self.answer(status, document)

    def create(self, organization: str, name: str, sdk: str, **options: str) -> tuple[int, dict[str, Any]]:
        repo = f"{organization}/{name}"
        if organization != "me":
            return 403, {"error": "no rights to create a space under this namespace"}
        if repo == HIDDEN:
            return 409, {"error": "this space exists"}
        self.server.repositories[repo] = {"id": repo, "sdk": sdk, "private": options["visibility"] == "private"}
        return 200, {"url": f"{self.server.address}/spaces/{repo}"}

    def commit(self, repo: str, body: bytes) -> dict[str, Any]:
        stored = self.server.files.setdefault(repo, {})
        for document in map(json.loads, body.decode().splitlines()):
            value = document["value"]
            if document["key"] == "file":
                stored[value["path"]] = base64.b64decode(value["content"])
            elif document["key"] == "lfsFile":
                stored[value["path"]] = self.server.large[value["oid"]]
        address = f"{self.server.address}/spaces/{repo}/commit/{COMMIT}"
        return {"commitUrl": address, "commitOid": COMMIT, "success": True}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage is another protocol
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def flags(*, yes: bool = True, **others: Any) -> ExportedConfig:
    return ExportedConfig(format="page", push_to_hub=others.pop("push_to_hub", "me/flowers"), yes=yes, **others)


def test_a_page_is_uploaded_as_a_space(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "notes.txt").write_text("of the user")
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/step_00000001.png").write_bytes(b"a grid")
    words = "--push_to_hub me/red-flowers --model_repo me/model --yes --zip"
    export_page(tmp_path, *words.split())
    own = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del own["notes.txt"], own[".rectified-flow.json"]
    stored = hub.files["me/red-flowers"]
    card = stored.pop("README.md").decode()
    assert stored == own
    assert stored["thumbnail.png"] == b"a grid"
    assert hub.repositories["me/red-flowers"] == {"id": "me/red-flowers", "sdk": "static", "private": False}
    assert SpaceCard(card).data.to_dict() == {
        "title": "Red flowers",
        "emoji": "🌼",
        "colorFrom": "green",
        "colorTo": "yellow",
        "sdk": "static",
        "license": "cc-by-4.0",
        "models": ["me/model"],
        "thumbnail": f"{hub.address}/spaces/me/red-flowers/resolve/main/thumbnail.png",
    }
    assert (
        "A rectified flow generates pictures in the visitor's browser, on the visitor's device. The model is " in card
    )
    assert f"[me/model]({hub.address}/me/model)" in card
    printed = capsys.readouterr().out
    size = sum(map(len, own.values())) + len(card.encode())
    assert f"upload      {len(own) + 1} files, {size / 1e6:.1f} MB: README.md, model.onnx, " in printed
    assert f"to          {hub.address}/spaces/me/red-flowers, a new public Space\n" in printed
    assert "licence     cc-by-4.0\n" in printed
    assert printed.endswith(f"space       {hub.address}/spaces/me/red-flowers\n")


@pytest.mark.parametrize(("answer", "agreed"), [("y", True), ("YES ", True), ("", False), ("n", False), (None, False)])
def test_nothing_is_sent_before_an_answer(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str | None, agreed: bool
) -> None:
    def ask(prompt: str) -> str:
        assert prompt == "Continue? [y/N] "
        assert "2 files, 0.0 MB: README.md, index.html" in capsys.readouterr().out
        assert hub.asked == ["GET /api/spaces/me/flowers"]
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", ask)
    space = find_space(flags(yes=False, private=True))
    assert space == HubSpace("me/flowers", exists=False, private=True)
    publish(space, {"index.html": b"page"}, "flow map", asks=True)
    assert (hub.files.get("me/flowers", {}).get("index.html") == b"page") == agreed
    assert ("nothing was uploaded" in capsys.readouterr().out) != agreed
    assert [each["private"] for each in hub.repositories.values() if "sdk" in each] == [True] * agreed


def test_an_existing_space_keeps_its_rights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["me/flowers"] = {"id": "me/flowers", "sdk": "static", "private": True}
    space = find_space(flags(license="mit"))
    assert space == HubSpace("me/flowers", exists=True, private=True, license_name="mit")
    publish(space, {"model.onnx": b"weights"}, "flow map", asks=False)
    assert "an existing private Space\nlicence     mit\n" in capsys.readouterr().out
    assert hub.files["me/flowers"]["model.onnx"] == b"weights"
    assert "POST /api/repos/create" not in hub.asked
    assert "thumbnail" not in readme(space, "flow map", False)


@pytest.mark.parametrize(
    ("given", "space", "sentence"),
    [
        (
            {"push_to_hub": "other/flowers"},
            None,
            "other/flowers: the access token does not allow this: choose one with",
        ),
        (
            {"push_to_hub": "me/hidden"},
            None,
            "me/hidden: the repository exists already, and the access token cannot read it",
        ),
        ({"push_to_hub": "me/flo wers"}, None, "me/flo wers is not an id of the hub .Repo id must "),
        ({"model_repo": "me/none"}, None, "--model_repo me/none: the repository does not exist"),
        (
            {"private": True},
            {"sdk": "static", "private": False},
            "is a public Space already: make it private on the hub",
        ),
        ({}, {"sdk": "gradio", "private": False}, "is a Space of the SDK gradio, which a page would replace"),
        ({"yes": False}, None, "asks before it uploads, and there is no terminal: pass --yes"),
    ],
)
def test_what_the_hub_or_the_program_refuses_is_a_sentence(
    hub: Hub, given: dict[str, Any], space: dict[str, Any] | None, sentence: str
) -> None:
    if space:
        hub.repositories["me/flowers"] = {"id": "me/flowers", **space}
    with pytest.raises(UsageError, match=sentence):
        publish(find_space(flags(**given)) or HubSpace("", True, True), {}, "flow map", asks=False)
    assert not hub.files


def test_no_token_a_wrong_one_and_no_network_are_sentences(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(UsageError, match=r"does not accept the access token: run `hf auth login`, or set HF_TOKEN$"):
        find_space(flags())
    monkeypatch.setattr("rectified_flow.cli.exports.space.get_token", lambda: None)
    with pytest.raises(UsageError, match=r"needs an access token of the hub: run `hf auth login`, or set HF_TOKEN$"):
        find_space(flags())
    monkeypatch.undo()
    assert len(hub.asked) == 1


def test_a_hub_that_fails_or_is_not_there_is_a_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    space = find_space(flags())
    assert space is not None
    hub.failing = "/commit/"
    with pytest.raises(RunError, match=r"the hub returned the status code 408 .*: check the network, or try again"):
        publish(space, {}, "flow map", asks=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"the hub sent no valid response .*refused"):
        find_space(flags())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="needs the hub, which HF_HUB_OFFLINE switches off: unset this variable"):
        find_space(flags())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--push_to_hub me/flowers", "--push_to_hub has no effect without --format page: pass both"),
        ("--format page --yes", "--yes has no effect without --push_to_hub: pass both"),
        ("--format page --push_to_hub flowers", "--push_to_hub flowers is not an id of the hub: pass OWNER/NAME"),
        ("--format page --push_to_hub me/a --license MIT", "--license MIT is not a license id of the hub"),
    ],
)
def test_flags_that_are_refused(words: str, sentence: str) -> None:
    assert_refused("export.py", 1, words, sentence)
