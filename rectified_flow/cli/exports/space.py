"""An exported page as a static Space on the Hugging Face hub."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from huggingface_hub import CommitOperationAdd, HfApi, SpaceCardData, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from rectified_flow.cli.exports.page import THUMBNAIL
from rectified_flow.cli.flags.sampling import ExportedConfig
from rectified_flow.errors import RunError, UsageError, first_line
from rectified_flow.system.terminal import line, lines

CARD_FILE, SDK = "README.md", "static"
LOGIN = "run `hf auth login`, or set HF_TOKEN"
REFUSALS = {
    401: f"the hub does not accept the access token: {LOGIN}",
    403: "the access token does not allow this: choose one with the permission to write, or another owner",
    404: "the repository does not exist, or the access token cannot read it: check the name",
    409: "the repository exists already, and the access token cannot read it: choose another name",
}
"""Remedies for the status codes with which the hub refuses a request."""
NO_ANSWER: tuple[type[Exception], ...] = (HfHubHTTPError.__bases__[0], OSError, RuntimeError, ValueError)
"""Errors of huggingface_hub if a request fails; the first is the base of all errors of its HTTP library."""


@dataclass(frozen=True)
class HubSpace:
    """A Space that a page is uploaded to."""

    repo_id: str
    exists: bool
    private: bool
    model: str | None = None
    """Id of the model on the hub that it links to."""
    license_name: str | None = None
    """Its licence, as the hub names it."""

    @property
    def address(self) -> str:
        """The address of the Space."""
        return f"{constants.ENDPOINT}/spaces/{self.repo_id}"


def find_space(flags: ExportedConfig) -> HubSpace | None:
    """Look for the Space of ``--push_to_hub`` on the hub. Nothing is created or uploaded.

    Args:
        flags: the flags of export.py.

    Returns:
        The Space, or None if the flags name none.

    Raises:
        UsageError: if there is no terminal for the question or no token, the hub is switched off, the Space has another
            SDK or is public although ``--private`` is set, the model does not exist, or the hub refuses the token.
        RunError: if the hub does not answer.
    """
    if flags.push_to_hub is None:
        return None
    what, license_name, found = f"--push_to_hub {flags.push_to_hub}", flags.license, None
    if not flags.yes and not sys.stdin.isatty():
        raise UsageError(f"{what} asks before it uploads, and there is no terminal: pass --yes")
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{what} needs the hub, which HF_HUB_OFFLINE switches off: unset this variable")
    if get_token() is None:
        raise UsageError(f"{what} needs an access token of the hub: {LOGIN}")
    with _answered(what):
        try:
            found = HfApi().space_info(flags.push_to_hub)
        except RepositoryNotFoundError as error:
            if error.response.status_code != 404:  # the token is not accepted
                raise
    if found is not None and found.sdk != SDK:
        raise UsageError(f"{what} is a Space of the SDK {found.sdk}, which a page would replace: choose another name")
    if found is not None and flags.private and not found.private:
        raise UsageError(f"{what} is a public Space already: make it private on the hub, or leave --private out")
    if flags.model_repo is not None:
        with _answered(f"--model_repo {flags.model_repo}"):
            card = HfApi().model_info(flags.model_repo).card_data
        license_name = license_name or getattr(card, "license", None)
    private = flags.private if found is None else bool(found.private)
    return HubSpace(flags.push_to_hub, found is not None, private, flags.model_repo, license_name)


def publish(space: HubSpace, page: Mapping[str, bytes], kind: str, *, asks: bool) -> None:
    """Print what becomes public, ask, and upload it to a Space, which is created if it does not exist.

    Args:
        space: the Space.
        page: contents of the files of the page by their paths; nothing else is uploaded, except for the README.
        kind: what generates the pictures, such as ``rectified flow``.
        asks: ask, and upload nothing after any answer but ``y`` or ``yes``.

    Raises:
        UsageError: if the hub refuses the upload.
        RunError: if the hub does not answer.
    """
    files = {CARD_FILE: readme(space, kind, THUMBNAIL in page).encode(), **page}
    state = "an existing" if space.exists else "a new"
    rights = "private" if space.private else "public"
    report = {
        "upload": f"{len(files)} files, {sum(map(len, files.values())) / 1e6:.1f} MB: {', '.join(files)}",
        "to": f"{space.address}, {state} {rights} Space",
        "licence": space.license_name or "none: pass --license to choose one",
    }
    print(lines(report))
    if asks and not _agrees():
        print(line("space", "nothing was uploaded"))
        return
    with _answered(f"--push_to_hub {space.repo_id}"):
        if not space.exists:
            HfApi().create_repo(space.repo_id, repo_type="space", space_sdk=SDK, private=space.private)
        additions = [CommitOperationAdd(name, content) for name, content in files.items()]
        HfApi().create_commit(space.repo_id, additions, repo_type="space", commit_message="Upload the page")
    print(line("space", space.address))


def readme(space: HubSpace, kind: str, has_thumbnail: bool) -> str:
    """Return the README of a Space, whose header the hub reads."""
    title = space.repo_id.rpartition("/")[2].replace("-", " ").replace("_", " ").capitalize()
    header = SpaceCardData(
        title=title,
        emoji="🌼",
        colorFrom="green",
        colorTo="yellow",
        sdk=SDK,
        license=space.license_name,
        models=[space.model] if space.model else None,
        thumbnail=f"{space.address}/resolve/main/{THUMBNAIL}" if has_thumbnail else None,
    )
    model = f" The model is [{space.model}]({constants.ENDPOINT}/{space.model})." if space.model else ""
    text = f"A {kind} generates pictures in the visitor's browser, on the visitor's device.{model}"
    return f"---\n{header.to_yaml()}\n---\n\n# {title}\n\n{text}\n"


def _agrees() -> bool:
    try:
        return input("Continue? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


@contextmanager
def _answered(what: str) -> Iterator[None]:
    """Turn an error of the hub about ``what`` into a sentence.

    Raises:
        UsageError: if the hub refuses the request, or ``what`` has an id that no repository can have.
        RunError: if it does not answer, or has an error of its own.
    """
    try:
        yield
    except HFValidationError as error:
        raise UsageError(
            f"{what} is not an id of the hub ({first_line(error).rstrip('.')}): pass another one"
        ) from error
    except NO_ANSWER as error:
        # an upload in a thread raises an error of its own from that of the hub
        answers = [getattr(each, "response", None) for each in (error, error.__cause__)]
        status = next((each.status_code for each in answers if each is not None), None)
        if status in REFUSALS:
            raise UsageError(f"{what}: {REFUSALS[status]}") from error
        reason = f"the hub returned the status code {status}" if status else "the hub sent no valid response"
        raise RunError(f"{what}: {reason} ({first_line(error)}): check the network, or try again later") from error
