"""Shared by all tests: GPU tests are skipped, and counted, where there is no GPU; a tiny target, and one on disk with a tokenizer."""

from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import interpreted  # first: it decides how Triton is imported
import pytest
import torch
import zoo
from accelerate.state import AcceleratorState

from draftsmith.eval import acceptance
from draftsmith.inference import machine
from draftsmith.models.target import Target
from draftsmith.train.engine import curves
from draftsmith.train.losses import chunked

if interpreted.INTERPRETED and find_spec("triton"):
    interpreted.mend()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every case of the tests marked one_in")
    parser.addoption("--kernels", action="store_true", help="tests/test_lossless.py with the Triton kernels: on a GPU, or interpreted")


def pytest_configure(config):
    chunked.ROWS = 1  # losses of tiny problems are computed in several chunks, as those of large ones are
    if config.option.kernels and not interpreted.INTERPRETED:
        zoo.DEVICE = "cuda"


def _numbers(item, numbers):
    """For each parametrize, and each fixture with parameters: the number of this case's value among those of its test."""
    test, params = item.nodeid.partition("[")[0], item.callspec.params
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [mark.replace(" ", "").split(",") if isinstance(mark, str) else list(mark) for mark in marks]
    for group in groups + [[each] for each in params if each not in sum(groups, [])]:
        order = numbers[test, *group]
        yield order.setdefault(str([params[each] for each in group]), len(order))


def pytest_collection_modifyitems(config, items):
    """Run one case in n of a test that is marked `one_in(n)`: the numbers of its parameters' values add up to a multiple of n, as in a Latin square.

    Raises UsageError if a value of a parameter occurs in none of them.
    """
    if not config.option.all and not any("[" in word for word in config.args):  # a case that is asked for by name runs
        left_out, values, numbers = [], {True: set(), False: set()}, defaultdict(dict)
        for item in items:
            if few := item.get_closest_marker("one_in"):
                name = item.nodeid.partition("[")[0]
                runs = sum(_numbers(item, numbers)) % few.args[0] == 0
                values[runs] |= {(name, parameter, str(value)) for parameter, value in item.callspec.params.items()}
                if not runs:
                    left_out.append(item)
        if never := values[False] - values[True]:
            raise pytest.UsageError(f"one_in leaves out all cases of {sorted(never)}; give it another number")
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _compiled_anew(request):
    """Dynamo counts recompilations by function and process, torch keeps freed memory: one test must not use up the next one's."""
    if "gpu" in request.keywords:
        torch._dynamo.reset()
    yield
    if "gpu" in request.keywords and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _denormals():
    """Commands flush them for good (`machine.threads`), also where a test calls one in this process."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _no_probe_of_loads(monkeypatch):
    """It takes its time by the clock: tests of the command ask for it."""
    monkeypatch.setattr(acceptance, "PROBE_S", 0.0)


@pytest.fixture(autouse=True)
def _no_picture_of_runs(request, monkeypatch):
    """It takes a second at the end of every training: test_curves.py draws it."""
    if request.path.name != "test_curves.py":
        monkeypatch.setattr(curves, "draw", lambda file, picture: None)


@pytest.fixture(autouse=True)
def _cpu_only(request, monkeypatch):
    """Exactness is claimed for fp32 on the CPU: on a GPU machine too, only tests marked gpu use the GPU."""
    if "gpu" not in request.keywords and zoo.DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        # On some CPUs bf16 wins the probe, on a busy one now and then: Accelerate keeps the first run's choice for the entire process.
        monkeypatch.setattr(machine, "precision", lambda: "fp32")


def pytest_terminal_summary(terminalreporter):
    skips = terminalreporter.stats.get("skipped", [])  # tests, and files that need a package
    skipped = [report for report in skips if isinstance(report, pytest.TestReport) and "gpu" in report.keywords]
    terminalreporter.write_line(f"GPU tests skipped: {len(skipped)}" + ("" if torch.cuda.is_available() else " (no CUDA device here)"))


def byte_tokenizer():
    """One token for each byte, and `<|endoftext|>` (id 256)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def save_byte_target(folder: Path) -> None:
    """Write a random Llama over bytes, as `save_pretrained` leaves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, max_position_embeddings=128, eos_token_id=256, bos_token_id=None, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny random Llama; a file that needs another target names its own."""
    return Target.wrap(zoo.tiny("llama"), name="small")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """The folder of `save_byte_target`."""
    folder = tmp_path_factory.mktemp("target")
    save_byte_target(folder)
    return folder


@pytest.fixture
def own_precision():
    """Accelerate keeps a process's first precision: tests of bf16 forget it before and after."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()
