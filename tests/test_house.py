"""The rules of the repository that a machine can check: words, names, imports, sizes. CONTRIBUTING.md says why."""

import ast
import io
import re
import tokenize
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["inference", "models", "data", "eval", "train"]  # each imports only from itself and from those before it

# Words of earlier versions that no paper and no library uses, and what to say instead.
PRIVATE_WORDS = {
    r"laws?": "distribution",
    r"told": "host result",
    r"silent": "without supervised tokens",
    r"bears? loss|loss-bearing|bearing loss": "supervised",
    r"twins?": "reference implementation",
    r"coins?": "uniform draw",
    r"one-draw|one_draw": "target-sample matching",
    r"coupled": "shared-noise",
    r"governors?|governed": "adaptive draft length",
    r"prices?|priced": "relative cost",
    r"share of limit|share_of_limit": "realised fraction of the predicted speedup",
    r"unroll(s|ed|ing)?": "training-time test",
    r"teachers?": "target",
    r"moments": "optimizer state",
    r"products": "matmul FLOPs",
    r"sketch(es|ed)?": "build untrained",
    r"renew(s|ed|al)?": "replay generation",
    r"hurry": "stop requested",
    r"sieves?": "dedup filter",
    r"signers?": "MinHash",
    r"leak(s|ed|ing|age)?": "contamination",
    r"picks|picked|dealt": "epoch sampling",
    r"talks?": "conversation state",
    r"wire": "API format",
    r"contests?": "interleaved benchmark",
    r"parted": "diverged",
    r"alike": "equal",
    r"whole": "complete",
    r"lies": "is stored",
    r"on end": "in a row",
    r"at the most": "at most, or peak",
    r"(?<!make )(?<!no )(?<!little )rooms?": "package",
    r"doors?": "command line",
    r"frontiers?": "current level",
    r"grow|growth": "expand",
    r"beams?": "dynamic tree",
    r"topolog(y|ies)": "static tree",
    r"seat(s|ed)?": "assign a slot",
    r"flights?|landed": "in-flight round",
    r"settles?|settled": "finalise",
    r"guards?|guarded": "error translation, watchdog",
    r"stall(s|ed)?": "watchdog",
    r"explained": "error translation",
}
# Grammar is no name: what is it that was found, made or kept?
EMPTY_NAMES = {"found", "one", "other", "some", "kept", "held", "made", "told", "here", "place", "places", "asked"}


def texts() -> dict[str, str]:
    """Every text of the repository that people read: code, documents, recipes."""
    files = [file for folder in (*PACKAGES, "recipes", "tests") for file in (ROOT / folder).rglob("*") if file.is_file()]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "LOG.md", "Makefile", "pyproject.toml")]
    endings = {".py", ".md", ".yaml", ".sh", ".toml", ""}
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in sorted(files)
        if file.suffix in endings and "__pycache__" not in file.parts
    }


def sources() -> dict[str, str]:
    return {name: text for name, text in texts().items() if name.endswith(".py") and name.split("/")[0] in PACKAGES}


def private_words(text: str) -> list[tuple[int, str, str]]:
    """(line, word, what to say instead); words are bounded by anything that is no letter, so those within a name count."""
    lines = enumerate(text.lower().splitlines(), 1)
    patterns = [(re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])"), instead) for pattern, instead in PRIVATE_WORDS.items()]
    return [(line, match[0], instead) for line, content in lines for pattern, instead in patterns for match in pattern.finditer(content)]


def empty_names(text: str) -> list[tuple[int, str]]:
    """(line, name) of variables, arguments and functions whose name says nothing.

    Strings, comments, and keywords of calls (`tl.load(x, other=0)`) do not count.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = []
    for i, token in enumerate(tokens[:-1]):
        before, after = tokens[max(i - 1, 0)], tokens[i + 1]
        keyword = before.string in ("(", ",") and after.string == "="
        if token.type == tokenize.NAME and token.string.strip("_") in EMPTY_NAMES and not keyword:
            names.append((token.start[0], token.string))
    return names


def test_no_private_word_is_used():
    files = {name: text for name, text in texts().items() if name not in ("tests/test_house.py", "CONTRIBUTING.md")}
    assert len(files) > 200 and {"README.md", "LOG.md", "train/medusa.py", "recipes/medusa-tiny.yaml", "tests/conftest.py"} <= files.keys()
    used = [f"{name}:{line}: {word!r}; say {instead!r}" for name, text in files.items() for line, word, instead in private_words(text)]
    assert not used, "\n".join(used)


def test_names_say_what_a_thing_is():
    files = sources()
    assert len(files) > 90
    used = [f"{name}:{line}: {word!r}" for name, text in files.items() for line, word in empty_names(text)]
    assert not used, "\n".join(used)
    counts = {name: len(re.findall(r"\bfound\b", text)) for name, text in texts().items() if name != "tests/test_house.py"}
    assert sum(counts.values()) <= 40, Counter(counts).most_common(20)


@pytest.mark.parametrize("text", ["a teacher's moments", "x = draw_law(3)", "held = 1", "the Governor rests", "# laws of q"])
def test_the_words_are_seen(text):
    assert private_words(text) or empty_names(text)


def imports(name: str, text: str) -> set[str]:
    """The modules of this project that a file imports, late imports and those for types included, as paths without .py."""
    wanted = set()
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        wanted |= {name.removeprefix("draftsmith.").replace(".", "/") for name in names if name.startswith("draftsmith.")}
    return {module for module in wanted if (ROOT / f"{module}.py").is_file()}


def test_imports_go_one_way():
    graph = {name.removesuffix(".py"): imports(name, text) for name, text in sources().items()}
    assert len(graph) > 90 and sum(map(len, graph.values())) > 300
    order = {package: place for place, package in enumerate(PACKAGES)}
    up = [f"{name} imports {module}" for name in graph for module in graph[name] if order[module.split("/")[0]] > order[name.split("/")[0]]]
    assert not up, "\n".join(up)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_files_and_functions_stay_short():
    files = sources()
    assert len(files) > 90
    long = {name: lines for name, text in files.items() if (lines := text.count("\n")) > 450}
    assert not long, long
    functions = []
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name != "main" and not any("jit" in ast.unparse(x) for x in node.decorator_list):
                functions.append((node.end_lineno - node.lineno + 1, f"{name}:{node.name}"))
    assert len(functions) > 800
    assert not [(length, name) for length, name in functions if length > 70]


def test_train_holds_what_people_come_for():
    scripts = {name for name, text in sources().items() if re.search(r"^class \w+\(Recipe\):", text, re.M)}
    assert {"train/medusa.py", "train/hydra.py", "train/mlp.py"} <= scripts
    assert len({f"train/{file.name}" for file in (ROOT / "train").glob("*.py")} - scripts) <= 8


def test_helpers_of_tests_are_modules_of_their_own():
    files = {name: text for name, text in texts().items() if name.startswith("tests/") and name.endswith(".py")}
    assert len(files) > 80
    shared = [name for name, text in files.items() if re.search(r"^\s*(from|import) test_", text, re.M)]
    assert not shared, shared
