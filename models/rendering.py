"""Chat templates as text. A template is code that comes with a model, so a process of its own renders it, with little memory and time.

The environment is the one that transformers' `apply_chat_template` makes (5.17 to 5.23), and a test holds the texts to be equal. This file is
also what that process runs, so it imports nothing of this project.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

CPU_SECONDS = 2.0  # that a rendering may take
EARNED_SECONDS = 0.1  # of these a process gets back with each rendering, so that many slow ones end as well
MEMORY = 1 << 30  # bytes of address space
CHARACTERS, TIMES = 1_000_000, 16  # a text may be this long, and this many times as long as what it is made of
OUT_OF_MEMORY = 97  # exit code
DATE = datetime(
    2024, 7, 26
)  # a template's "today": with the clock's, no text would be the same tomorrow; Llama 3's where there is no clock
REASONING = ("reasoning_content", "thinking", "reasoning")  # the keys that data use for it; templates read the first two
# What Python raises for code as it stands in templates.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
    jinja2.TemplateError,
)


class RenderingFailed(ValueError):
    """A text that a template does not give.

    Attributes:
        kind: "syntax", the template is not valid Jinja; "refused", it raises an error for these messages; "limits", it takes too much.
        reason: one short line, without end.
    """

    def __init__(self, kind: Literal["syntax", "refused", "limits"], reason: str) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason

    def __str__(self) -> str:
        return self.reason


def render(
    template: str,
    messages: list[dict[str, Any]],
    special_tokens: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans [start, end) in it that the template marks with {% generation %}.

    Args:
        template: Jinja source.
        messages: turns with `role` and `content`.
        special_tokens: their names (`bos_token`) and texts.
        tools: descriptions of functions.
        prompt: end with what asks the model for its turn.

    Raises:
        RenderingFailed: an invalid template, one that refuses the messages, or one that takes more than it may.
    """
    variables = {
        "messages": [with_reasoning(message) for message in messages],
        "tools": tools,
        "documents": None,
        "add_generation_prompt": prompt,
        **special_tokens,
    }
    try:
        request = json.dumps({"template": template, "variables": variables}, default=lambda value: f"<{type(value).__name__}>")
    except RecursionError:
        raise RenderingFailed("refused", "the messages are nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RenderingFailed("refused", f"the messages are no JSON ({error})") from None
    reply = _renderer.ask(request.encode() + b"\n")
    if "kind" in reply:
        raise RenderingFailed(reply["kind"], reply["reason"])
    return reply["text"], [(start, end) for start, end in reply["spans"]]


def with_reasoning(message: Any) -> Any:
    """The message with its reasoning under the keys that templates read, as transformers 5.23 gives it to them."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Renderer:
    """The process that renders, started when it is first needed, and again where a template has ended it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the process. A child of this one must not share it."""
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> dict[str, Any]:
        with self.lock:
            process, self.process = self.process or self._start(), None
            try:
                reply = self._exchange(process, request)
                if reply:
                    self.process = process
                    return json.loads(reply)
            finally:
                if self.process is None:  # it died, or this thread was interrupted while it waited
                    _end(process)
            raise RenderingFailed("limits", _cause_of_death(process.returncode))

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is for this process, which then closes the pipe.
        command = [sys.executable, "-P", os.path.abspath(__file__)]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """The line that answers, empty where the process has died."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if not reply.endswith(b"\n"):
            process.wait()
            return b""
        return reply

    def close(self) -> None:
        if self.process is not None:
            _end(self.process)
            self.process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, which has nothing to lose. One that has ended by itself keeps its exit code."""
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        process.stdin.close()  # writes what is left of a request
    except BrokenPipeError:
        pass


def _cause_of_death(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"rendering takes more than {CPU_SECONDS:g} s, or {EARNED_SECONDS:g} s each time"
    if code == OUT_OF_MEMORY:
        return f"rendering takes more than {MEMORY >> 20} MiB"
    return f"rendering ends its process (exit code {code})"


_renderer = _Renderer()
os.register_at_fork(after_in_child=_renderer.reset)
atexit.register(_renderer.close)


# From here on: what the process does.


class _Marks(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: notes where its text is in what is rendered."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks: list[str] | None = None
        self.spans: list[tuple[int, int]] = []
        environment.extend(marks=self)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Any) -> str:
        text = caller()
        start = len("".join(self.blocks or []))
        self.spans.append((start, start + len(text)))
        return text

    @contextmanager
    def noting(self) -> Iterator[list[str]]:
        self.blocks, self.spans = [], []
        yield self.blocks
        self.blocks = None


class _Dict:
    """`dict` without attributes that lead anywhere."""

    def __call__(self, *args: Any, **keywords: Any) -> dict[Any, Any]:
        return dict(*args, **keywords)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no name that begins with an underscore."""

    def __init__(*args: Any, **keywords: Any) -> None:  # type: ignore[misc]  # so that `namespace(self=…)` works
        self, args = args[0], args[1:]
        attributes = dict(*args, **keywords)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r}")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    extensions = [_Marks, jinja2.ext.loopcontrols]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = DATE.strftime
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


def _answer(request: bytes) -> dict[str, Any]:
    """What the process says to a request: `text` and `spans`, or `kind` and `reason`."""
    content = json.loads(request)
    try:
        template = _compiled(content["template"])
        marks = cast(Any, template.environment).marks
        with marks.noting() as blocks:
            for block in template.generate(**content["variables"]):
                blocks.append(block)
            text = "".join(blocks)
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "reason": _first_line(error.message or "")}
    except ERRORS as error:
        return {"kind": "refused", "reason": _first_line(str(error)) or type(error).__name__}
    if len(text) > CHARACTERS + TIMES * len(request):
        return {"kind": "limits", "reason": f"the text has {len(text):,} characters, for {len(request):,} bytes of template and messages"}
    return {"text": text, "spans": marks.spans}


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0][:100]


def _lower_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _serve() -> None:
    """Answer each line of stdin with a line. SIGPROF ends the process once its time is used up, also within one long operation."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if sys.platform != "darwin":  # which refuses any limit of address space
        _lower_limit(resource.RLIMIT_AS, MEMORY)
    _lower_limit(resource.RLIMIT_CORE, 0)
    allowance = CPU_SECONDS
    for request in sys.stdin.buffer:
        allowance = min(CPU_SECONDS, allowance + EARNED_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, allowance)
        started = time.process_time()
        reply = json.dumps(_answer(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        allowance = max(0.0, allowance - (time.process_time() - started))
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        _serve()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
