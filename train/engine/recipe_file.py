"""The YAML of recipes: flat or in sections, plain values and lists, nothing that runs, refers or nests without end."""

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LIMIT = 1 << 18  # most bytes of a recipe; the largest of recipes/ has 2e3
DEPTH = 6  # of mappings and lists within each other; a list of sources in a section needs four


def read(file: Path) -> dict[str, Any]:
    """The values of a recipe by `section.key`; lists are tuples.

    Raises:
        ValueError: it is no file, too large, not UTF-8, no YAML of this kind, or gives a key twice. It names the file.
        OSError: it cannot be read.
    """
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise ValueError(f"recipe {str(file)!r} is {what}; give a YAML file")
    if file.stat().st_size > LIMIT:
        raise ValueError(f"{file}: {file.stat().st_size:,} bytes; expected a recipe of at most {LIMIT:,}")
    try:
        values = parse(file.read_bytes().decode("utf-8"))
        if isinstance(values, dict):
            return flatten(values)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{file}: not a YAML recipe: {' '.join(str(error).split())}") from None
    got = "nothing" if values is None else "a list" if isinstance(values, list) else "text"
    raise ValueError(f"{file}: expected `key: value` lines, got {got}")


def parse(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: it is not YAML, or it has anchors, tags, several documents, a key twice, or lists and mappings deeper than DEPTH.
    """
    try:
        _check(yaml.parse(text, Loader=_Loader))
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by keys with dots between the names; lists as tuples. Raises ValueError for a key that is given twice."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        more = flatten(value, f"{name}.") if isinstance(value, dict) else {name: tuple(value) if isinstance(value, list) else value}
        if twice := flat.keys() & more.keys():
            raise ValueError(f"key {min(twice)!r} is given twice")
        flat |= more
    return flat


def _check(events: Iterator[yaml.Event]) -> None:
    """Raise ValueError for what a recipe must not hold, before anything is built of it."""
    depth = documents = 0
    for event in events:
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.NodeEvent) and event.anchor:
            raise ValueError(f"line {event.start_mark.line + 1}: anchors and aliases are not read; write the value itself")
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise ValueError(f"line {event.start_mark.line + 1}: the tag {tag!r} is not read; leave it out")
        if depth > DEPTH:
            raise ValueError(f"line {event.start_mark.line + 1}: nested deeper than {DEPTH} lists or mappings")
        if documents > 1:
            raise ValueError(f"line {event.start_mark.line + 1}: more than one document; a recipe is one")


class _Loader(yaml.SafeLoader):
    """YAML as a recipe means it: 2e-3 is a number, 2025-11-21 and 1:30 are text, 0100 is no octal number, and a key that is given twice is an
    error."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: a key should be a word")
            if key.value in seen:
                raise yaml.YAMLError(f"key {key.value!r} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_EXPONENT = r"[eE][-+]?\d{1,3}"
_FLOAT = rf"(\d[\d_]*\.[\d_]*|\.\d[\d_]*)({_EXPONENT})?|\d+{_EXPONENT}|\.(inf|Inf|INF)"
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^([-+]?({_FLOAT})|\.(nan|NaN|NAN))$"), list("-+.0123456789"))
