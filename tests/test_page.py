"""The report page: what it shows stands in the JSON report, nothing from outside becomes mark-up, and the same records give the same bytes."""

import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hand_records import by_chance, divergence, lossy_by_chance

from draftsmith.eval import card
from draftsmith.eval.page import content_json, html, markdown, page_content
from draftsmith.eval.report import report_of

ROOT = Path(__file__).resolve().parents[1]
LOAD = {
    "batches": [1, 2, 4, 8],
    "speedup": [1.53, 1.41, 1.13, 0.91],
    "low": [1.4, 1.3, 1.0, 0.8],
    "high": [1.6, 1.5, 1.2, 1.0],
    "break_even": 4,
}
HOSTILE = "</span><script>alert(1)</script><img src=http://x.example/a onerror=alert(2)> $x$ | `a` *b* \x1b[31m\u202e {{ c }} "
VOID = {"meta", "br", "img", "link", "input"}


def content_of(records, load=LOAD):
    return page_content(records, report_of(records)) | {"by_batch": load}


@pytest.fixture(scope="module")
def content():
    return content_of(by_chance(settings=("0", "0.7 top_p=0.9")))


class Page(HTMLParser):
    """Elements with attributes; the numbers that are marked up; texts that are not inside a chart, a style sheet or a quotation."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.numbers, self.texts, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self._open.append((tag, attributes))

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, text):
        tag, attributes = self._open[-1] if self._open else ("", {})
        outside = any(name in ("svg", "style") or "quoted" in inner.get("class", "").split() for name, inner in self._open)
        if tag == "data":
            self.numbers.append((attributes["value"], text))
        elif not outside:
            self.texts.append(text)


def numbers_in(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return {number for inner in value for number in numbers_in(inner)}
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


@pytest.mark.parametrize("lossy", [False, True])
def test_every_number_shown_is_in_the_json(content, lossy):
    content = content_of(lossy_by_chance()) if lossy else content
    page, known = Page(html(content)), numbers_in(json.loads(content_json(content)))
    assert len(page.numbers) > 200 and len({value for value, _ in page.numbers}) > 100
    for value, text in page.numbers:
        assert json.loads(value) in known, (value, text)
        shown = float(text.replace(",", "").replace("−", "-").rstrip("%")) / (100 if text.endswith("%") else 1)
        decimals = len(text.rstrip("%").partition(".")[2]) + 2 * text.endswith("%")
        assert abs(shown - json.loads(value)) <= 0.5001 * 10**-decimals, (value, text)
    title = re.compile(r"Acceptance of .* for .*")
    assert not [text for text in page.texts if re.search(r"\d", text) and not title.match(text)]


def test_a_number_that_is_not_in_the_json_would_be_noticed(content):
    other = deepcopy(content)
    other["verdict"]["tau"] = 7.654321
    known = numbers_in(json.loads(content_json(content)))
    assert [value for value, _ in Page(html(other)).numbers if json.loads(value) not in known] == ["7.654321"]


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(content, tmp_path):
    """In another process too, whatever the hashes of its strings are."""
    script = (
        "import sys\nfrom hand_records import by_chance\nfrom test_page import content_of\nfrom draftsmith.eval import page\n"
        "content = content_of(by_chance(settings=('0', '0.7 top_p=0.9')))\n"
        "open(sys.argv[1], 'w', encoding='utf-8').write(page.html(content) + page.content_json(content) + page.markdown(content))"
    )
    path = os.pathsep.join((str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONHASHSEED": "17", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "page")], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "page").read_text(encoding="utf-8") == html(content) + content_json(content) + markdown(content)


def test_nothing_from_outside_becomes_markup_and_nothing_is_fetched():
    records = by_chance(domains=(HOSTILE, "plain"))
    records.pieces = {token: HOSTILE + piece for token, piece in records.pieces.items()}
    for name in ("target", "drafter", "machine", "versions"):
        records.header[name] |= dict.fromkeys(records.header[name], HOSTILE)
    records.header["skipped"][HOSTILE] = 3
    records.requests = [replace(each, language=HOSTILE, prompt=HOSTILE + each.prompt) for each in records.requests]
    content = content_of(records)
    text = html(content)
    page = Page(text)
    assert not {"script", "img", "iframe", "link", "object"} & {tag for tag, _ in page.elements}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on") and (name.startswith("xmlns") or "://" not in (value or "")), (tag, name, value)
    assert "url(" not in re.sub(r"url\(#", "", text) and "@import" not in text
    assert "default-src 'none'" in text and "&lt;script&gt;" in text and "\x1b" not in text and "\u202e" not in text
    table = [line for line in markdown(content).splitlines() if line.startswith("| ")]
    assert "<script" not in markdown(content) and "\x1b" not in markdown(content)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table if "alert" in line} <= {6, 7} and sum(
        "alert" in line for line in table
    ) >= 1


def test_ids_are_unique_and_tables_have_headings(content):
    page = Page(html(content))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50
    named = {attributes["aria-labelledby"] for _, attributes in page.elements if "aria-labelledby" in attributes}
    assert named <= set(ids) and {"slices", "failures", "provenance", "load"} <= named
    assert all(attributes.get("aria-hidden") for tag, attributes in page.elements if tag == "svg")
    assert all(attributes.get("scope") for tag, attributes in page.elements if tag == "th")
    charts = [tag for tag, _ in page.elements if tag == "svg"]
    assert len(charts) == 4
    references = re.findall(r'(?:url\(#|href="#)([\w-]+)', html(content))
    assert references and set(references) <= set(ids)


@pytest.mark.parametrize("bugs, lossy, mark", [(0, False, ""), (0, True, "LOSSY"), (1, False, "NOT LOSSLESS"), (1, True, "NOT LOSSLESS")])
def test_what_is_not_lossless_is_written_across_the_page(bugs, lossy, mark):
    records = by_chance(settings=("0", "1 rule=typical") if lossy else ("0",), tokens=12)
    diverged = [replace(each, divergence=divergence(each.prompt, bug=number < bugs)) for number, each in enumerate(records.requests[:2])]
    records.requests[:2] = diverged
    content = content_of(records, None)
    assert content["watermark"] == mark and content["verdict"]["bugs"] == bugs and content["verdict"]["ties"] == 2 - bugs
    text = html(content)
    assert (f'data-watermark="{mark}"' in text) == bool(mark) == ("data-watermark=" in text)
    assert ("LOSSY: the rule" in text) == lossy and ("NOT LOSSLESS:" in text) == bool(bugs)
    expected = "not lossless" if bugs else "lossy" if lossy else "lossless up to rounding"
    assert content["verdict"]["lossless"] == expected


def test_a_warning_is_shown_to_its_end(content):
    warning = f"{'a/long/name.py, ' * 12}and more; τ <1.70> with them, 1.66 without"
    assert f"{warning.replace('<', '&lt;').replace('>', '&gt;')}</bdi>." in html(content | {"warnings": [warning]})


def test_the_panel_of_loads_is_there_where_loads_are_known(content):
    assert 'id="load"' in html(content) and "From a batch of" in html(content)
    assert "It pays from some batch on." in html(content | {"by_batch": LOAD | {"break_even": None, "speedup": [0.9, 1.1, 1.2, 1.3]}})
    assert "It pays at every batch shown." in html(content | {"by_batch": LOAD | {"break_even": None, "speedup": [1.1, None, 1.2, 1.3]}})
    unknown = [None] * len(LOAD["batches"])
    assert html(content | {"by_batch": LOAD | {"low": unknown, "high": unknown}}).count("too few prompts") > html(content).count(
        "too few prompts"
    )
    without = html(content | {"by_batch": None})
    assert 'id="load"' not in without and "break-even" not in without


@pytest.mark.parametrize("tree", [{"depth": 2, "width": 2, "nodes": 5}, []])
def test_less_than_everything_gives_a_page_too(tree):
    """A drafter without weights: no position records, a dynamic tree or none; two prompts."""
    records = by_chance(prompts=4)
    records.positions, records.tree = [], {"tree": tree, "nodes": 5 if tree else 1, "depth": 2 if tree else 0}
    content = content_of(records, None)
    text = html(content)
    assert content["ranks_formed"] is content["ranks_drawn"] is None and content["calibration"] == []
    assert 'id="calibration"' not in text and 'id="ranks"' not in text and ("dynamic tree" in text) == bool(tree)
    assert "too few prompts" in text and "too few prompts" in markdown(content)
    check(content, schema(), schema())
    Page(text)


def test_the_text_is_coloured_by_the_depth_at_which_tokens_were_accepted():
    records = by_chance()
    text = content_of(records)["text"]
    (request,) = [each for each in records.requests if each.prompt == text["prompt"]]
    expected = [depth for each in request.rounds for depth in (*range(1, each.committed), 0)]
    assert text["depths"] == expected and sum(text["by_depth"]) == len(expected) == text["tokens"]
    assert html(content_of(records)).count('<span class="d2">') == 1 + text["by_depth"][2]


def test_a_large_report_stays_small(content):
    domain = next(iter(content["domains"]["0"].values()))
    many = {f"domain {i} " + "x" * 300: domain for i in range(5000)}
    large = content | {"domains": dict.fromkeys(content["domains"], many), "divergences": [], "skipped": dict.fromkeys(many, 1)}
    large["draft_tree"] = [{"path": [0] * k, "accepted": 0.1} for k in range(1, 33)] + [
        {"path": [i], "accepted": 0.1} for i in range(1, 900)
    ]
    text = html(large)
    assert len(text.encode()) < 3_000_000 and "the JSON report has all" in text


def schema():
    return json.loads((ROOT / "eval" / "report.schema.json").read_text(encoding="utf-8"))


def check(value, rule, root, where="report"):
    """What of JSON Schema report.schema.json uses."""
    kinds = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool, "null": type(None)}
    known = {
        "type",
        "properties",
        "required",
        "items",
        "additionalProperties",
        "anyOf",
        "enum",
        "const",
        "minimum",
        "maximum",
        "minProperties",
    }
    assert set(rule) <= known | {"$ref", "description", "$defs", "$schema", "title"}, where
    if "$ref" in rule:
        return check(value, root["$defs"][rule["$ref"].removeprefix("#/$defs/")], root, where)
    wanted = rule.get("type", list(kinds))
    wanted = [wanted] if isinstance(wanted, str) else wanted
    fits = any(isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in wanted)
    assert fits, f"{where}: {value!r:.60} is no {wanted}"
    assert value in rule.get("enum", [value]) and value == rule.get("const", value), where
    if "anyOf" in rule:
        errors = []
        for choice in rule["anyOf"]:
            try:
                check(value, choice, root, where)
            except AssertionError as error:
                errors.append(str(error))
        assert len(errors) < len(rule["anyOf"]), errors
    if isinstance(value, dict):
        assert set(rule.get("required", [])) <= set(value) and len(value) >= rule.get("minProperties", 0), f"{where}: {sorted(value)}"
        for key, inner in value.items():
            check(inner, rule.get("properties", {}).get(key, rule.get("additionalProperties", {})), root, f"{where}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            check(inner, rule.get("items", {}), root, f"{where}[{i}]")
    elif isinstance(value, int | float):
        assert rule.get("minimum", value) <= value <= rule.get("maximum", value), f"{where}: {value}"


def test_the_json_report_is_of_the_published_schema(content):
    read = json.loads(content_json(content))
    expected = set(schema()["properties"]) - {"quality"}  # which lossy rules alone have
    assert read == content and set(read) == expected, "describe the new key in report.schema.json"
    check(read, schema(), schema())
    try:
        import jsonschema
    except ImportError:
        pass
    else:
        jsonschema.validate(read, schema())
    for wrong in ({"nodes": "5"}, {"distinct": 1.5}, {"watermark": "x"}, {"text": {}}, {"slices": {"context": []}}, {"calibration": [{}]}):
        with pytest.raises(AssertionError):
            check(read | wrong, schema(), schema())


def test_what_a_lossy_rule_costs_stands_beside_its_tau():
    records = lossy_by_chance()
    report = report_of(records)
    content = page_content(records, report)
    check(content, schema(), schema())
    assert set(content["quality"]) == set(content["lossy"]) == {"0.7 rule=typical", "1 top_k=5 rule=membership"}
    first, second = content["quality"].values()
    assert first["accuracy"]["drafted"] == 0.25 and first["accuracy"]["plain"] == 0.5 and first["accuracy"]["plain_only"] == 3
    assert first["tau"] == content["overall"]["0.7 rule=typical"]["tau"] and first["kl"] > 0
    assert second["kl"] is None and second["outside"] == 2
    text, lines = html(content), markdown(content).splitlines()
    assert 'id="quality"' in text and "accepted tokens that plain decoding never draws" in text
    assert text.index('id="quality"') < text.index('id="domains"') and text.count("LOSSY</span>") >= 2
    rows = [line for line in lines if " LOSSY | " in line]
    assert len(rows) == 2 and f"| {first['tau']:.2f} | {first['kl']:.3f} (" in rows[0] and "| infinite |" in rows[1]
    assert len({line.count(" | ") for line in (lines[0], *rows)}) == 1
    measured = card.measured(report, markdown(content))
    assert measured.count("LOSSY, τ") == 2 and "right answers 25.0%, plain 50.0%, of 12 prompts" in measured
    named = [row["metrics"][0] for row in card.results(content)["model-index"][0]["results"] if "LOSSY" in row["metrics"][0]["name"]]
    assert named and all(("kl" in row["args"]) == (row["name"].endswith("T=0.7 rule=typical LOSSY")) for row in named)
    assert all(row["args"]["accuracy"] == 0.25 and row["args"]["plain_accuracy"] == 0.5 for row in named)
    none = content_of(lossy_by_chance(references=False))
    check(none, schema(), schema())
    assert html(none).count("no reference that can be judged") == 2 and "| none | – | – | – |" in markdown(none)
    old = content_of(by_chance(settings=("1 rule=typical",)))
    assert "quality" not in old and "not recorded" in html(old) and "KL" not in markdown(old)
    without = content_of(by_chance())
    assert "quality" not in without and 'id="quality"' not in html(without)


def test_the_markdown_has_survival_slices_and_failures(content):
    lines = markdown(content).splitlines()
    assert lines[0] == "| depth | survival | 95 % interval |" and lines[2].startswith(f"| 1 | {content['survival'][0]['share']:.3f} |")
    assert any(line.startswith("| highest quarter |") for line in lines) and any(line.startswith("| lost at |") for line in lines)
