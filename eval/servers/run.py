"""Ask servers under given loads, in turn, and record each request as it ends.

For each load and repeat the servers are measured one after the other, A, B, A, B, …, so that drift of the machine hits all of them. All get
the same prompts in the same order, and with a rate the same arrivals.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.data.prompts import Prompt
from draftsmith.data.server import Server
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.servers.counters import read_counters
from draftsmith.eval.servers.records import (
    CountersRecord,
    Load,
    Measurement,
    ServedRequest,
    ServeRecords,
    counters_line,
    records_of,
    request_line,
)
from draftsmith.eval.servers.requests import RequestFailed, ask, model_of
from draftsmith.inference.progress import Bar

DOWN = 10  # requests that failed in a row: the server is gone, or refuses all of them
WARM_UP = 3  # requests of each server that do not count
TIMINGS = ("predicted_n", "draft_n", "draft_n_accepted")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How servers are asked.

    Attributes:
        loads: each is measured.
        repeats: how often each prompt is asked of each server at each load.
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        seed: of arrivals, of the order of prompts, and at T > 0 of answers.
    """

    loads: tuple[Load, ...]
    repeats: int
    max_new_tokens: int
    temperature: float
    seed: int


def plan(settings: ServeSettings, servers: int) -> Iterator[Measurement]:
    """The measurements, in their order."""
    for load in settings.loads:
        for repeat in range(settings.repeats):
            for server in range(servers):
                yield Measurement(load.label, repeat, server)


def order(prompts: Sequence[Prompt], measurement: Measurement, seed: int) -> list[Prompt]:
    """The prompts of a measurement, in the same random order for each server."""
    return random.Random(f"order {seed} {measurement.load} {measurement.repeat}").sample(prompts, len(prompts))


def arrivals(rate: float, count: int, measurement: Measurement, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process that begins with its first arrival, the same for each server."""
    draws = random.Random(f"arrivals {seed} {measurement.load} {measurement.repeat}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draws.expovariate(rate))
    return times[:count]


def request_of(prompt: Prompt, model: str, measurement: Measurement, settings: ServeSettings) -> tuple[str, str]:
    """Path and body of a request: a conversation is chat, a text is continued."""
    fields: dict[str, Any] = {"model": model, "max_tokens": settings.max_new_tokens, "temperature": settings.temperature}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if settings.temperature:
        fields["seed"] = random.Random(f"answer {settings.seed} {measurement.repeat} {prompt.id}").getrandbits(31)
    if prompt.messages:
        return "chat/completions", json.dumps(fields | {"messages": list(prompt.messages)})
    return "completions", json.dumps(fields | {"prompt": prompt.text})


async def models_of(servers: Sequence[Server], wanted: Sequence[str | None]) -> list[dict[str, str]]:
    """The model of each server, with the server's name.

    Raises:
        ValueError: as `requests.model_of`.
    """
    models = []
    for server, name in zip(servers, wanted, strict=True):
        async with server.connected(1):
            models.append({"name": server.name} | await model_of(server, name))
    return models


class ServeRun:
    """One run of a benchmark, which continues what the store has.

    Args:
        servers: the first is the baseline.
        prompts: of which only the first turns are asked.
        settings: how.
        store: opened, with the header of this benchmark.
        duration_s: after the warm-up, no request is sent later than this.
        show: show a progress bar.

    Attributes:
        records: all so far.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        prompts: Sequence[Prompt],
        settings: ServeSettings,
        store: RecordStore,
        duration_s: float,
        show: bool,
    ) -> None:
        self.servers, self.prompts, self.settings, self.store = servers, prompts, settings, store
        self.duration_s, self.deadline, self.show = duration_s, math.inf, show
        self.records = self._recorded()
        self.models = [each["model"] for each in self.records.header["servers"]]
        self.done = len(self.records.requests)
        self.failed: list[dict[str, Any]] = []  # lines of requests that failed in a row; they are written once another is answered
        self.errors = sum(bool(each.error) for each in self.records.requests)
        self.writing = asyncio.Lock()

    def _recorded(self) -> ServeRecords:
        source = str(self.store.folder or "records")
        return records_of([(f"{source}:{number}", line) for number, line in enumerate(self.store.lines, 1)], source)

    def measure(self) -> ServeRecords:
        """Measure what is missing.

        Raises:
            ValueError: a server that answers no warm-up request, or DOWN requests in a row that failed.
            OSError: a record cannot be written.
        """
        if len(self.records.requests) < self.records.planned:
            try:
                asyncio.run(self._measure())
            except ExceptionGroup as errors:
                raise _first(errors) from None
            self.records = self._recorded()
        return self.records

    async def _measure(self) -> None:
        largest = max(int(load.value) if load.kind == "concurrency" else len(self.prompts) for load in self.settings.loads)
        loads = {load.label: load for load in self.settings.loads}
        with Bar("serve-bench", self.records.planned, len(self.records.requests), self.show) as self.bar:
            async with AsyncExitStack() as stack:
                for server in self.servers:
                    await stack.enter_async_context(server.connected(largest))
                for number in range(len(self.servers)):
                    await self._warm_up(number)
                self.deadline = time.perf_counter() + self.duration_s
                for measurement in plan(self.settings, len(self.servers)):
                    await self._segment(measurement, loads[measurement.load])
                for line in self.failed:
                    await self._append(line)

    async def _warm_up(self, number: int) -> None:
        """Requests that do not count; the first error of a server is said at once."""
        server = self.servers[number]
        for prompt in self.prompts[:WARM_UP]:
            path, body = request_of(prompt, self.models[number], Measurement("warm-up", 0, number), self.settings)
            try:
                await ask(server, path, body, time.perf_counter)
            except RequestFailed as error:
                raise ValueError(f"{server.name}/{path}: the first requests failed: {error}; correct --url, --model or --prompts") from None

    async def _segment(self, measurement: Measurement, load: Load) -> None:
        """Measure what is missing: one segment."""
        earlier = [each for each in self.records.requests if each.measurement == measurement]
        recorded = {each.prompt for each in earlier}
        missing = [prompt for prompt in order(self.prompts, measurement, self.settings.seed) if prompt.id not in recorded]
        if not missing or time.perf_counter() > self.deadline:
            return
        number = 1 + max((each.segment for each in earlier), default=-1)
        before = await read_counters(self.servers[measurement.server])
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            segment = _Segment(measurement, number, start, tasks)
            if load.kind == "rate":
                await self._open_loop(segment, missing, load.value)
            else:
                waiting = iter(missing)
                for _ in range(int(load.value)):
                    tasks.create_task(self._closed_loop(segment, waiting))
        after = await read_counters(self.servers[measurement.server])
        await self._append(counters_line(CountersRecord(*measurement, number, before, after)))

    async def _closed_loop(self, segment: "_Segment", waiting: Iterator[Prompt]) -> None:
        """One of the slots: the next request is sent when the one before it has ended."""
        for prompt in waiting:  # one iterator, shared by all slots
            if time.perf_counter() > self.deadline:
                return
            await self._request(segment, prompt, time.perf_counter())

    async def _open_loop(self, segment: "_Segment", prompts: list[Prompt], rate: float) -> None:
        """Requests are sent at their times, whether earlier ones have ended or not."""
        times = arrivals(rate, len(prompts), segment.measurement, self.settings.seed)
        for prompt, due in zip(prompts, (segment.start + each for each in times), strict=True):
            await asyncio.sleep(max(0.0, min(due, self.deadline) - time.perf_counter()))
            if time.perf_counter() > self.deadline:
                return
            segment.tasks.create_task(self._request(segment, prompt, due))

    async def _request(self, segment: "_Segment", prompt: Prompt, due: float) -> None:
        measurement, start = segment.measurement, segment.start
        server = self.servers[measurement.server]
        path, body = request_of(prompt, self.models[measurement.server], measurement, self.settings)
        sent, answer = time.perf_counter(), {}
        try:
            reply = await ask(server, path, body, time.perf_counter)
            end = reply.end
            answer = {"chunks_s": [each - start for each in reply.chunks], "text": reply.text, "reason": reply.reason}
            answer |= {"prompt_tokens": reply.prompt_tokens, "tokens": reply.tokens}
            answer["drafting"] = {name: reply.timings[name] for name in TIMINGS if type(reply.timings.get(name)) is int}
        except RequestFailed as error:
            end = time.perf_counter()
            answer["error"] = str(error)
            self.errors += 1
        record = ServedRequest(*measurement, segment.number, prompt.id, due - start, sent - start, end - start, **answer)
        self.failed.append(request_line(record))
        if not record.error:
            for line in self.failed:
                segment.tasks.create_task(self._append(line))  # the next request does not wait for the disk
            self.failed = []
        if len(self.failed) >= DOWN:
            raise ValueError(
                f"{server.name}: {len(self.failed)} requests failed one after the other, the last with: {answer.get('error', '')}; see to the "
                "server, and run the same command again"
            )

    async def _append(self, line: dict[str, Any]) -> None:
        """Record a line. Syncing takes milliseconds, in which other answers go on."""
        async with self.writing:
            await asyncio.to_thread(self.store.append, [line])
        self.done += line["kind"] == "request"
        errors = f"  {self.errors} errors" if self.errors else ""
        name = self.records.header["servers"][line["server"]]["name"]
        self.bar.update(self.done, f"{name}, {line['load']}, repeat {line['repeat'] + 1}/{self.settings.repeats}{errors}")


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment that is being measured: its measurement and number, the clock at its start, and its tasks."""

    measurement: Measurement
    number: int
    start: float
    tasks: asyncio.TaskGroup


def header_of(models: list[dict[str, str]], settings: ServeSettings, count: int, digest: str, versions: dict[str, str]) -> dict[str, Any]:
    """The header of the records.

    Args:
        models: see `models_of`.
        settings: how servers are asked.
        count: of prompts.
        digest: of the prompts, see `prompts.hash_of`.
        versions: of libraries; they may change while a benchmark is continued.
    """
    return {
        "servers": models,
        "settings": asdict(settings) | {"loads": [list(load) for load in settings.loads]},
        "prompts": {"count": count, "hash": digest},
        "versions": versions,
    }


def _first(errors: ExceptionGroup) -> Exception:
    """The first error of nested groups."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
