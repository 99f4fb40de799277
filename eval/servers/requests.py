"""One streamed request to an OpenAI-compatible server, timed chunk by chunk, and the model that the server serves.

A *chunk* is an event of the stream that carries text. Without speculation it holds one token, with speculation the tokens of a round, so
that tokens are counted by the server's `usage`, not by chunks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from draftsmith.data.server import ANSWER, Server, TooLong
from draftsmith.data.text_files import parse, short

Clock = Callable[[], float]
AFTER = 1.0  # seconds, for a stream to end after its last event
NAMED = 8  # models that an error line names


class RequestFailed(Exception):
    """The server gave no complete answer; the message says why, in one line."""


@dataclass(slots=True)
class Reply:
    """A complete answer.

    Attributes:
        chunks: the clock at each chunk.
        end: the clock at the end of the stream.
        text: all chunks, reasoning included.
        reason: why it ended, as the server has it.
        prompt_tokens: by the server's usage; None where the server sends none.
        tokens: of the answer, likewise.
        timings: the last `timings` of llama.cpp; {} elsewhere.
    """

    chunks: list[float] = field(default_factory=list)
    end: float = 0.0
    text: str = ""
    reason: str = ""
    prompt_tokens: int | None = None
    tokens: int | None = None
    timings: dict[str, Any] = field(default_factory=dict)


def open_benchmarked(url: str, timeout: float) -> Server:
    """The server at an address with or without /v1.

    Args:
        url: such as http://127.0.0.1:8000.
        timeout: seconds that a request may take.

    Raises:
        ValueError: no address of a server, or a key that no header may hold.
    """
    return Server(f"{url.rstrip('/').removesuffix('/v1')}/v1", timeout, 0)


def root_of(server: Server) -> str:
    """The server's address without /v1, for what is not of OpenAI's API."""
    return str(server.address).rstrip("/").removesuffix("/v1")


async def get(server: Server, address: str) -> tuple[int, str]:
    """Status and body of a GET, at `address` or relative to /v1.

    Raises:
        RequestFailed: no answer, or one that is too long.
    """
    try:
        async with asyncio.timeout(server.timeout), server.client.stream("GET", address) as response:
            return response.status_code, await server.text(response)
    except TimeoutError:
        raise RequestFailed(f"no answer within {server.timeout:g} seconds") from None
    except (httpx.RequestError, TooLong) as error:
        raise RequestFailed(server.printable(f"{type(error).__name__} {error}".strip())) from None


async def model_of(server: Server, wanted: str | None) -> dict[str, str]:
    """The model that a server serves.

    Args:
        server: connected.
        wanted: its name; None takes the only one.

    Returns:
        model: the name for requests; engine and root: `owned_by` and `root` as the server has them, "" where it has none.

    Raises:
        ValueError: no server, no key or a wrong one, no OpenAI-compatible server, no such model, or several of them.
    """
    try:
        status, text = await get(server, "models")
    except RequestFailed as error:
        raise ValueError(f"{server.name}: no server answers there ({error}); start it, or correct --url") from None
    check_status(server, "models", status, text)
    try:
        models = [entry for entry in parse(text, "", surrogates=True)["data"] if isinstance(entry["id"], str)]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{server.name}/models: expected a list of models, got {short(text)}; correct --url") from None
    names = [entry["id"] for entry in models]
    listed = server.printable(", ".join(names[:NAMED])) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    if wanted is None and len(names) != 1:
        raise ValueError(f"{server.name} serves {len(names)} models ({listed}); expected one; name it with --model")
    if wanted is not None and wanted not in names:
        raise ValueError(f"{server.name} serves {listed or 'no model'}; expected {wanted!r}; correct --model")
    entry = models[names.index(wanted) if wanted is not None else 0]
    return {"model": _valid(entry["id"])} | {
        name: _valid(str(entry.get(key) or "")) for name, key in (("engine", "owned_by"), ("root", "root"))
    }


def check_status(server: Server, path: str, status: int, text: str) -> None:
    """Check the status of the first answer of a server.

    Raises:
        ValueError: it is not 200; the line says what to do.
    """
    if status == 200:
        return
    advice = "see to the server"
    if status in (401, 403):
        advice = "set OPENAI_API_KEY to the key of this server"
    elif status == 404 or 300 <= status < 400:
        advice = "expected an OpenAI-compatible server (redirects are not followed); correct --url"
    raise ValueError(f"{server.name}/{path}: {status} {server.message(text)}".rstrip() + f"; {advice}")


async def ask(server: Server, path: str, body: str, clock: Clock) -> Reply:
    """Send one request, and read its stream.

    Args:
        server: connected.
        path: completions or chat/completions.
        body: JSON, with `stream`.
        clock: seconds.

    Raises:
        RequestFailed: no complete answer. Nothing is repeated.
    """
    try:
        async with asyncio.timeout(server.timeout) as limit, server.client.stream("POST", path, content=body) as response:
            if response.status_code != 200:
                raise RequestFailed(f"{response.status_code} {server.message(await server.text(response))}".strip())
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise RequestFailed(server.printable(f"an answer in {response.headers['Content-Encoding']}, which was not asked for"))
            blocks = response.aiter_raw()
            reply = await read_stream(blocks, clock, server.message)
            limit.reschedule(None)  # the answer is complete
            await _read_to_end(blocks)
            return reply
    except TimeoutError:
        raise RequestFailed(f"no complete answer within {server.timeout:g} seconds") from None
    except (httpx.RequestError, TooLong) as error:
        raise RequestFailed(server.printable(f"{type(error).__name__} {error}".strip())) from None


async def _read_to_end(blocks: AsyncIterator[bytes]) -> None:
    """Read what a server still sends after its last event, so that the next request can use the connection. One that does not end is closed."""
    with suppress(TimeoutError, httpx.RequestError):
        async with asyncio.timeout(AFTER):
            async for _ in blocks:
                pass


async def read_stream(blocks: AsyncIterator[bytes], clock: Clock, message: Callable[[str], str] = short) -> Reply:
    """The answer in a stream of server-sent events.

    Args:
        blocks: the body as it arrives.
        clock: is read at each event.
        message: makes one printable line of what the server says.

    Raises:
        RequestFailed: a malformed line, an error of the server, or a stream that ends before its `finish_reason`.
    """
    reply = Reply()
    async for data in _events(blocks, message):
        if data == b"[DONE]":
            break
        _take(reply, data, clock(), message)
    reply.end = clock()
    if not reply.reason:
        raise RequestFailed(f"the stream ended before its finish_reason, after {len(reply.chunks)} chunks")
    return reply


async def _events(blocks: AsyncIterator[bytes], message: Callable[[str], str]) -> AsyncIterator[bytes]:
    """The value of each `data` line; comments and other fields are left out."""
    rest, size = b"", 0
    async for block in blocks:
        size += len(block)
        if size > ANSWER:
            raise TooLong(f"an answer of more than {ANSWER:,} bytes")
        *complete, rest = (rest + block).split(b"\n")
        for line in complete:
            name, colon, value = line.rstrip(b"\r").partition(b":")
            if name == b"data" and value.strip():
                yield value.strip()
            elif name and not (colon and name.isalpha()):
                raise RequestFailed(f"a malformed line in the stream: {message(line.decode('utf-8', 'replace'))}")


def _take(reply: Reply, data: bytes, now: float, message: Callable[[str], str]) -> None:
    """Add one event to the answer."""
    text = data.decode("utf-8", "replace")
    malformed = f"a malformed line in the stream: {message(text)}"
    try:
        content = parse(text, "", surrogates=True)
    except ValueError:
        raise RequestFailed(malformed) from None
    if not isinstance(content, dict):
        raise RequestFailed(malformed)
    if content.get("error"):
        raise RequestFailed(f"an error in the stream: {message(text)}")
    try:
        usage, choices = content.get("usage") or {}, content.get("choices") or []
        if usage:
            reply.prompt_tokens, reply.tokens = _count(usage["prompt_tokens"]), _count(usage["completion_tokens"])
        timings = content.get("timings")
        reply.timings = timings if timings and isinstance(timings, dict) else reply.timings
        for choice in choices[:1]:
            delta = choice.get("delta") or {}
            parts = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), choice.get("text"))
            if piece := "".join(part for part in parts if part):
                reply.text += _valid(piece)
                reply.chunks.append(now)
            reply.reason = _valid(str(choice.get("finish_reason") or reply.reason))
    except (KeyError, TypeError, AttributeError):
        raise RequestFailed(malformed) from None


def _valid(text: str) -> str:
    """The text with halves of surrogate pairs, which JSON can spell and no file can hold, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value
