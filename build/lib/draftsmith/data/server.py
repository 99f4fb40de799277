"""Asking a server that speaks OpenAI's protocol: what it refuses, what is tried again, and what it says."""

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

Message = dict[str, Any]
Job = TypeVar("Job")

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a request is repeated: doubled each time
LONGEST_ASKED = 600.0  # seconds: a Retry-After beyond it is a mistake, or a night
# What servers say of one request, not of all: too long (OpenAI and vLLM, SGLang, TGI), refused by the model's chat template.
ITS_OWN = re.compile(r"context.?length|`inputs` (must have less|tokens \+)|roles? (must alternate|not supported)", re.IGNORECASE)


class Refused(Exception):
    """A request that this server cannot answer, though it can others; in its words."""


class Failed(Exception):
    """A request that failed as often as it may, and why."""


class Server:
    """A server that speaks OpenAI's protocol. `place` is its address without what may be secret in it.

    A request may take `timeout` seconds, and is repeated up to `retries` times. Raises ValueError for numbers or an address that cannot be.
    """

    def __init__(self, base_url: str, timeout: float, retries: int, key: str) -> None:
        if not (timeout > 0 and retries >= 0):
            raise ValueError(f"got timeout {timeout}, retries {retries}; expected seconds above 0, and 0 or more; correct them")
        try:
            address = httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"got a server's address with {error}; expected one such as http://localhost:8000/v1; correct it") from None
        self.place = f"{address.scheme}://{address.netloc.decode()}{address.path.rstrip('/')}"
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"got server {self.place!r}; expected an address such as http://localhost:8000/v1; correct it")
        self.address, self.timeout, self.retries, self.key = address, timeout, retries, key
        self.client: httpx.AsyncClient

    def connected(self, concurrency: int) -> httpx.AsyncClient:
        """A context in which `post` works, with so many connections at most."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self.client = httpx.AsyncClient(base_url=self.address, headers=headers, limits=limits, timeout=None)
        return self.client

    def each(self, jobs: Iterable[Job], do: Callable[[Job], Awaitable[None]], concurrency: int) -> None:
        """Do each job, at most `concurrency` at a time. The first error ends all, and is raised by itself."""
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:  # one iterator for all workers
                await do(job)

        async def work_together() -> None:
            async with self.connected(concurrency), asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(work())

        try:
            asyncio.run(work_together())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def post(self, path: str, body: str) -> tuple[Message, str]:
        """The answer to a request: its fields, and why it ended ("stop" or "length").

        Raises:
            Refused: this request, by what it asks. Failed: after the last repetition. ValueError: a request that is wrong for this server.
        """
        told, pause = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
                await asyncio.sleep(max(pause, wait * random.uniform(0.5, 1.0)))
            pause = 0.0
            try:
                async with asyncio.timeout(self.timeout):
                    response = await self.client.post(path, content=body)
            except TimeoutError:
                told = f"no answer within {self.timeout:g} seconds"
                continue
            except httpx.RequestError as error:
                told = f"{type(error).__name__} {error}".strip()
                continue
            status, words = response.status_code, self._words(response)
            if status == 200 and (found := _read(response.text)):
                return found
            told = f"{status} {words}" if status != 200 else f"a broken answer: {words}"
            if status < 500 and status not in (200, 408, 425, 429):
                if ITS_OWN.search(told):
                    raise Refused(told)
                raise ValueError(f"{self.place}/{path}: {told}; correct it (omit leaves fields out), and run the same command again")
            pause = _seconds(response.headers.get("Retry-After", ""))
        raise Failed(f"{told} ({self.retries + 1} times)")

    def _words(self, response: httpx.Response) -> str:
        """What the server says, in one line, without the key."""
        said: Any = response.text
        with suppress(ValueError):
            said = json.loads(said)
        for name in ("error", "message", "detail"):
            said = said.get(name, said) if isinstance(said, dict) else said
        words = " ".join(str(said).split())
        return (words.replace(self.key, "***") if self.key else words)[:300]


def _read(text: str) -> tuple[Message, str] | None:
    """The answer in a server's JSON; None for what is none, or was broken off."""
    try:
        choice = json.loads(text)["choices"][0]
        message: Any = choice.get("message") or {"content": choice["text"]}
        reason = {"eos_token": "stop", "stop_sequence": "stop"}.get(choice["finish_reason"], choice["finish_reason"])
        thought = message.get("reasoning_content") or message.get("reasoning")
        content = message["content"] if thought is None else message.get("content") or ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    if reason not in ("stop", "length") or not isinstance(content, str):
        return None
    return {"content": content} | ({"reasoning_content": thought} if thought else {}), reason


def wire(message: Message) -> Message:
    """A message as the protocol has it: arguments of calls are text there, and calls have ids."""
    kept = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if message.get(name) is not None}
    calls = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        wired = {"name": function["name"], "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        calls.append({"id": call.get("id") or f"call_{number}", "type": "function", "function": wired})
    return {"content": "", **kept} | ({"tool_calls": calls} if calls else {})


def _seconds(retry_after: str) -> float:
    """Retry-After is a number of seconds, or a date; 0 for anything else."""
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(0.0, seconds), LONGEST_ASKED)
