"""Send a folder to a model repository of the Hugging Face Hub: what arrived is not sent again, and every refusal is one line.

Large files go first, each by itself, and are stored by their hash; one commit then puts all files into the repository. A repository is
therefore never half published: a run that was cut off leaves it as it was, and the next one finds the large files there.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from draftsmith.data.server import seconds_asked
from draftsmith.inference.reading import read_json
from draftsmith.inference.terminal import printable
from draftsmith.train.engine.redact import redacted

Value = TypeVar("Value")

TRIES = 5
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before a request is repeated; doubled each time
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
AGAIN = "what arrived stays there: run the same command again"
# The base class of the errors of the HTTP library that this version of the client uses: httpx, httpx2, …
TRANSPORT = cast(type[Exception], HfHubHTTPError.__bases__[0])


class Identity(NamedTuple):
    """What a repository's config.json says it holds: a method, for a target with this hash of its config and of this name."""

    method: str
    config_hash: str
    target: str


class Sent(NamedTuple):
    """Where the files are; whether a commit was needed; which earlier files of ours it deleted."""

    address: str
    changed: bool
    deleted: list[str]


def identity_of(config: dict[str, Any]) -> Identity:
    """The identity of the content of a config.json; method and hash are "" in configs that are not ours."""
    entry = config.get("draftsmith", config)
    target = entry.get("target") if isinstance(entry, dict) else None
    target = target if isinstance(target, dict) else {}
    method = "draft model" if "draftsmith" in config else str(config.get("model_type", ""))
    return Identity(method, str(target.get("config_hash", "")), str(target.get("name", "")))


def check_name(repo: str) -> None:
    """Raises ValueError for what is no USER/NAME of the Hub."""
    name = repo.partition("/")[2]
    if not REPOSITORY.fullmatch(repo) or "--" in repo or ".." in repo or len(name) > 96 or name.endswith((".git", ".ipynb", ".", "-")):
        raise ValueError(
            f"got repository {repo!r}; expected USER/NAME of letters, digits, `-`, `_` and `.`, such as someone/llama-3.1-8b-eagle3; correct it"
        )


def address(repo: str) -> str:
    """Where a repository is on the web."""
    return f"{constants.ENDPOINT}/{repo}"


def send(
    folder: Path,
    files: list[str],
    repo: str,
    private: bool,
    ours: Callable[[str], bool],
    say: Callable[[str], object],
) -> Sent:
    """Put files of a folder into a repository, which is created where it is not there.

    Args:
        folder: with a config.json.
        files: paths within it, which are also those in the repository.
        repo: USER/NAME.
        private: of a repository that is created.
        ours: whether a path in the repository would be one of a drafter's; such files that are not sent are deleted, since they are of other
            weights. The rest of the repository stays.
        say: is called with a line about what is done.

    Raises:
        ValueError: no token, no permission, another artifact's repository, a public one for `private`, or a Hub that cannot be reached.
    """
    token = get_token()
    if not token:
        raise ValueError("got no token of the Hub; expected one that may write; give it with `hf auth login` or in HF_TOKEN")
    api = HfApi(endpoint=constants.ENDPOINT, token=token, library_name="draftsmith")
    with _errors_in_one_line(repo, token), _no_secrets_in_warnings():
        info = _repository(api, repo, private, folder)
        additions = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=folder / path) for path in files]
        for number, addition in enumerate(additions, 1):
            say(f"file {number} of {len(additions)}: {addition.path_in_repo}")
            _send_large(api, repo, addition)
        deleted = sorted(path for path in _paths(info) if ours(path) and path not in files)
        operations = [*additions, *(CommitOperationDelete(path) for path in deleted)]
        # A commit whose answer was lost moves the branch away from `parent_commit`: it is not made twice.
        message = "Publish with draftsmith"
        done = _repeated(lambda: api.create_commit(repo, operations, commit_message=message, parent_commit=info.sha))
    return Sent(address(repo), done.oid != info.sha, deleted)


def _repository(api: HfApi, repo: str, private: bool, folder: Path) -> Any:
    """What the Hub says of the repository, which is there afterwards, and is empty or holds this artifact. Raises as `send`."""

    def look() -> Any:
        try:
            return api.model_info(repo)
        except HfHubHTTPError as error:
            if _status(error) == 404:
                return None
            raise

    def create() -> None:
        try:
            api.create_repo(repo, private=private)
        except HfHubHTTPError as error:
            if _status(error) != 409:  # there by now, perhaps by an earlier attempt of ours
                raise

    info = _repeated(look)
    if info is None:
        _repeated(create)
        info = _repeated(look)
    if info is None:
        raise ValueError(f"{repo} is taken, and the token may not see what it holds; give another name")
    if private and not info.private:
        raise ValueError(f"{repo} is there and public, got --private; give another name, or make it private in its settings")
    present, wanted = _paths(info), identity_of(read_json(folder / "config.json"))
    if "config.json" in present:
        holds = _repeated(lambda: _identity_there(repo, str(api.token)))
        if holds[:2] != wanted[:2]:
            raise ValueError(f"{repo} is taken: it holds {_described(holds)}, this is {_described(wanted)}; give another name")
    elif foreign := sorted(path for path in present if path not in (".gitattributes", "README.md")):
        raise ValueError(f"{repo} is taken: it holds {printable(foreign[0], keep='')} and no config.json of a drafter; give another name")
    return info


def _paths(info: Any) -> set[str]:
    return {sibling.rfilename for sibling in info.siblings or ()}


def _identity_there(repo: str, token: str) -> Identity:
    """The identity of what a repository holds: nothing, where its config.json is none."""
    address = hf_hub_url(repo, "config.json", endpoint=constants.ENDPOINT)
    answer = get_session().get(address, headers=build_hf_headers(token=token, library_name="draftsmith"))
    hf_raise_for_status(answer)
    try:
        config = answer.json()
    except ValueError:
        config = None
    return identity_of(config) if isinstance(config, dict) else Identity("", "", "")


def _described(identity: Identity) -> str:
    method, config_hash, target = (printable(word, keep="") for word in identity)
    return f"{method or 'something'} for {target or 'no target'} ({config_hash[:12] or 'no hash'})"


def _send_large(api: HfApi, repo: str, addition: CommitOperationAdd) -> None:
    """Send a file that the Hub does not store in its commits; others are left to the commit. The client itself repeats these requests."""
    try:
        api.preupload_lfs_files(repo, [addition], free_memory=False)
    except RuntimeError as error:  # the client's word for a transfer that failed
        if isinstance(error.__cause__, TRANSPORT):
            raise error.__cause__ from None
        raise ValueError(f"{addition.path_in_repo} could not be sent ({error.__cause__ or error}); {AGAIN}") from None


def _repeated(do: Callable[[], Value]) -> Value:
    """What `do` returns. It is repeated where the Hub is busy or cannot be reached, after as long as it asks for."""
    for attempt in range(TRIES):
        try:
            return do()
        except TRANSPORT as error:
            status = _status(error)
            if attempt == TRIES - 1 or (status is not None and status not in (408, 429) and status < 500):
                raise
            wanted = cast(Any, error).response.headers.get("Retry-After", "") if status else ""
            time.sleep(max(min(LONGEST_WAIT, FIRST_WAIT * 2**attempt), seconds_asked(wanted)))
    raise AssertionError("the last attempt returned or raised")


def _status(error: BaseException) -> int | None:
    """The status of an answer; None where there was none."""
    return cast(Any, error).response.status_code if isinstance(error, HfHubHTTPError) else None


@contextmanager
def _errors_in_one_line(repo: str, token: str) -> Iterator[None]:
    """Turn errors of the client and of the connection into a ValueError, without the token and without signed addresses."""
    try:
        yield
    except TRANSPORT as error:
        words = (cast(Any, error).server_message if isinstance(error, HfHubHTTPError) else str(error)) or type(error).__name__
        words = printable(redacted(" ".join(words.split()).replace(token, "***")), keep="")[:300]
        raise ValueError(_advice(repo, _status(error), words)) from None
    except (ValueError, OSError) as error:
        if token in str(error):
            raise ValueError(str(error).replace(token, "***")) from None
        raise


def _advice(repo: str, status: int | None, words: str) -> str:
    """One line on an answer of the Hub, or on none."""
    owner = repo.partition("/")[0]
    if status == 401:
        return f"the Hub does not accept the token (401: {words}); give a valid one with `hf auth login` or in HF_TOKEN"
    if status == 403:
        return f"the token may not write to {repo} (403: {words}); give one with write access to {owner}"
    if status in (409, 412):
        return f"{repo} was changed or created by someone else meanwhile ({status}: {words}); look at it, then run the same command again"
    if status is None:
        return f"the connection to {constants.ENDPOINT} broke ({words}); {AGAIN}"
    if status in (408, 429) or status >= 500:
        return f"the Hub is busy or down ({status}: {words}); {AGAIN}"
    return f"the Hub refused {repo} ({status}: {words}); correct it, and run the same command again"


class _WithoutSecrets(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redacted(record.getMessage()), ()
        return True


@contextmanager
def _no_secrets_in_warnings() -> Iterator[None]:
    """The client warns of requests that it repeats, with their addresses; those of uploads are signed."""
    handlers = tuple(logging.getLogger("huggingface_hub").handlers)
    secret = _WithoutSecrets()
    for handler in handlers:
        handler.addFilter(secret)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(secret)
