"""A client of servers with OpenAI's API: what is refused, what is tried again, and what the server says."""

import asyncio
import ipaddress
import json
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from draftsmith.data.text_files import parse
from draftsmith.inference.terminal import printable

Message = dict[str, Any]
Job = TypeVar("Job")

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a request is repeated; doubled each time
ANSWER = 1 << 24  # most bytes of an answer
SECRET = 16  # characters from which a key is taken out of answers; "EMPTY" is no secret, and a word
LONGEST_ASKED = 600.0  # seconds: a Retry-After beyond it is a mistake, or a night
# Errors of one request, not of all requests: too long (OpenAI and vLLM, SGLang, TGI), refused by the model's chat template.
ONE_REQUEST = re.compile(r"context.?length|`inputs` (must have less|tokens \+)|roles? (must alternate|not supported)", re.IGNORECASE)


class Refused(Exception):
    """This server cannot answer this request, but can answer others; the message is the server's."""


class TooLong(Exception):
    """An answer that is longer than any answer is, or that might expand to one."""


class Failed(Exception):
    """A request failed as often as `retries` allows; the message says why."""


class Server:
    """A server with OpenAI's API. `name` is its address without user and password.

    A request may take `timeout` seconds, and is repeated up to `retries` times. The key in $OPENAI_API_KEY, if any, is sent as a bearer token.

    Raises:
        ValueError: a number out of range, an address that is not one, or a key that no header may hold.
    """

    def __init__(self, base_url: str, timeout: float, retries: int) -> None:
        if not (timeout > 0 and retries >= 0):
            raise ValueError(f"got timeout {timeout}, retries {retries}; expected seconds above 0, and 0 or more; correct them")
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the key in $OPENAI_API_KEY has characters that no HTTP header may hold; set it again")
        try:
            address = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            reason = str(error) if "@" not in base_url else "a fault"  # which might quote the password
            raise ValueError(f"got a server's address with {reason}; expected one such as http://localhost:8000/v1; correct it") from None
        self.name = f"{address.scheme}://{address.netloc.decode()}{address.path.rstrip('/')}"
        if address.scheme not in ("http", "https") or not address.host or not 0 < (address.port or 80) < 2**16:
            raise ValueError(f"got server {self.name!r}; expected an address such as http://localhost:8000/v1; correct it")
        self.address, self.timeout, self.retries, self.key = address, timeout, retries, key
        self.client: httpx.AsyncClient

    def connected(self, concurrency: int) -> httpx.AsyncClient:
        """A context in which `post` works, with at most `concurrency` connections."""
        # Nothing compressed: a few bytes could expand to more than there is memory.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        # Proxies of the environment are for other machines.
        self.client = httpx.AsyncClient(
            base_url=self.address, headers=headers, limits=limits, timeout=None, trust_env=not _is_loopback(self.address.host)
        )
        return self.client

    def each(self, jobs: Iterable[Job], do: Callable[[Job], Awaitable[None]], concurrency: int) -> None:
        """Run `do` on each job, at most `concurrency` at a time. The first error cancels the rest and is raised."""
        jobs = list(jobs)
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:  # one iterator, shared by all workers
                await do(job)

        async def work_together() -> None:
            async with self.connected(concurrency), asyncio.TaskGroup() as workers:
                for _ in range(min(concurrency, len(jobs))):
                    workers.create_task(work())

        try:
            asyncio.run(work_together())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def post(self, path: str, body: str) -> tuple[Message, str]:
        """The answer to a request: the message's fields, and its finish reason ("stop" or "length").

        Raises:
            Refused: the server refuses this request alone.
            Failed: the last repetition failed too.
            ValueError: the server refuses requests of this kind.
        """
        problem, pause = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
                await asyncio.sleep(max(pause, wait * random.uniform(0.5, 1.0)))
            pause = 0.0
            try:
                async with asyncio.timeout(self.timeout), self.client.stream("POST", path, content=body) as response:
                    text = await self.text(response)
            except TimeoutError:
                problem = f"no answer within {self.timeout:g} seconds"
                continue
            except (httpx.RequestError, TooLong) as error:
                problem = self.printable(f"{type(error).__name__} {error}".strip())
                continue
            status, message = response.status_code, self.message(text)
            answer = _read(text) if status == 200 else None
            if answer:
                return self._without_key(answer[0]), answer[1]
            problem = f"{status} {message}" if status != 200 else f"a broken answer: {message}"
            if status < 500 and status not in (200, 408, 425, 429):
                if ONE_REQUEST.search(problem):
                    raise Refused(problem)
                raise ValueError(f"{self.name}/{path}: {problem}; correct it (omit leaves fields out), and run the same command again")
            pause = seconds_asked(response.headers.get("Retry-After", ""))
        raise Failed(f"{problem} ({self.retries + 1} times)")

    async def text(self, response: httpx.Response) -> str:
        """The body of a response. Raises TooLong for one of more than ANSWER bytes, or a compressed one."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TooLong(f"an answer in {response.headers['Content-Encoding']}, which was not asked for")
        body = bytearray()
        async for block in response.aiter_raw():
            body += block
            if len(body) > ANSWER:
                raise TooLong(f"an answer of more than {ANSWER:,} bytes")
        return body.decode("utf-8", "replace")

    def message(self, text: str) -> str:
        """The server's error message in one line, without the key."""
        said: Any = text
        with suppress(ValueError):
            said = parse(text, "", surrogates=True)
        for name in ("error", "message", "detail"):
            said = said.get(name, said) if isinstance(said, dict) else said
        return self.printable(" ".join(str(said).split()))[:300]

    def printable(self, words: str) -> str:
        """Words from outside, without the key."""
        return printable(words.replace(self.key, "***") if self.key else words, "")

    def _without_key(self, answer: Message) -> Message:
        if len(self.key) < SECRET:
            return answer
        return {name: value.replace(self.key, "***") for name, value in answer.items()}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(text: str) -> tuple[Message, str] | None:
    """The answer in a server's JSON; None if there is none or it is incomplete."""
    try:
        choice = parse(text, "", surrogates=True)["choices"][0]
        message: Any = choice.get("message") or {"content": choice["text"]}
        reason = {"eos_token": "stop", "stop_sequence": "stop"}.get(choice["finish_reason"], choice["finish_reason"])
        thought = message.get("reasoning_content") or message.get("reasoning")
        content = message["content"] if thought is None else message.get("content") or ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    if reason not in ("stop", "length") or not isinstance(content, str) or not isinstance(thought, str | None):
        return None
    return {"content": content} | ({"reasoning_content": thought} if thought else {}), reason


def to_api(message: Message) -> Message:
    """A message in the API's format, in which arguments of calls are text and calls have ids. Raises Refused for a call without a name."""
    fields = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if message.get(name) is not None}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused("a tool call in it names no function")
        arguments = function.get("arguments", {})
        api_function = {"name": function["name"], "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        calls.append({"id": call.get("id") or f"call_{number}", "type": "function", "function": api_function})
    if calls:
        fields["tool_calls"] = calls
    return {"content": "", **fields}


def seconds_asked(retry_after: str) -> float:
    """Seconds of a Retry-After header, which is a number or a date; 0 for anything else."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_ASKED)
