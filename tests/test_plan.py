"""`draftsmith plan`: the memory that it reports is what PyTorch's own profiler sees a real step allocate; its sums are those of real models."""

import gc
import json
import re

import pytest
import torch
import zoo
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig

from draftsmith.inference.errors import exit_on_error
from draftsmith.models import span_attention
from draftsmith.models.target import Target
from draftsmith.train import dflash, distill, dspark, eagle, hydra, kangaroo, medusa, mlp, mtp, pard, peagle, recipe
from draftsmith.train.engine import optimizer as optimizers
from draftsmith.train.losses import chunked
from draftsmith.train.plan import command, memory, report, trace
from draftsmith.train.plan.memory import GIB, Machine, PlannedRun

CPU = Machine(1, 1, GIB, cpu=True)
ROWS, POSITIONS = 4, 128

# A method's recipe for the shipped target, with keys that take another way through its objective.
CASES = {
    "medusa by KL": (medusa, "medusa-tiny", []),
    "medusa by CE, shared head": (medusa, "medusa-tiny", ["medusa.distill=0.0", "medusa.share_head=true", "medusa.layers=2"]),
    "medusa-2": (medusa, "medusa2-tiny", []),
    "medusa-2 by CE, shared head": (medusa, "medusa2-tiny", ["joint.base=ce", "joint.dropout=0.0", "medusa.share_head=true"]),
    "eagle3": (eagle, "eagle3-tiny", ["eagle.steps=3"]),
    "eagle3, small vocabulary, checkpointing": (
        eagle,
        "eagle3-tiny",
        ["eagle.steps=3", "eagle.vocab_size=500", "eagle.checkpointing=true"],
    ),
    "eagle1": (eagle, "eagle1-tiny", []),
    "hydra": (hydra, "hydra-tiny", []),
    "hydra, shared head": (hydra, "hydra-tiny", ["hydra.share_head=true", "hydra.distill=0.5"]),
    "hydra++": (hydra, "hydra-tiny", ["hydra.prefix=true", "hydra.layers=4"]),
    "mlp": (mlp, "mlp-tiny", []),
    "mlp, own weights": (mlp, "mlp-tiny", ["mlp.tie_weights=false", "mlp.distill=0.5", "mlp.heads=3"]),
    "mlp, LSTM by CE": (mlp, "mlp-tiny", ["mlp.cell=lstm", "mlp.distill=0.0", "mlp.inner_size=96"]),
    "dflash": (dflash, "dflash-tiny", []),
    "dflash, causal, paced": (
        dflash,
        "dflash-tiny",
        ["dflash.causal=true", "dflash.weights=pace", "dflash.gamma=4", "dflash.loss=0.5 kl + 0.5 nll"],
    ),
    "dspark": (dspark, "dspark-tiny", []),
    "peagle": (peagle, "peagle-tiny", []),
    "kangaroo": (kangaroo, "kangaroo-tiny", []),
    "mtp": (mtp, "mtp-tiny", []),
    "mtp by NLL, checkpointing": (mtp, "mtp-tiny", ["mtp.loss=nll", "mtp.steps=4", "mtp.checkpointing=true"]),
    "pard": (pard, "pard-tiny", []),
    "distill, random": (distill, "distill-tiny", ["student.start=random", "student.layers=2", "distill.loss=0.5 kl + 0.5 tv"]),
    "distill, pruned": (distill, "distill-tiny", ["student.start=pruned", "student.layers=[0,3]", "student.checkpointing=true"]),
    "distill, LoRA": (distill, "distill-tiny", ["student.lora=4"]),
}


VARIANTS = {  # of a method that has another case
    "medusa by CE, shared head",
    "medusa-2",
    "eagle3, small vocabulary, checkpointing",
    "hydra, shared head",
    "hydra++",
    "mlp, own weights",
    "mlp, LSTM by CE",
    "dflash, causal, paced",
    "mtp by NLL, checkpointing",
    "distill, random",
    "distill, pruned",
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    """Losses run in four chunks, one more than is traced. conftest's chunks of a row each would be many operations."""
    monkeypatch.setattr(chunked, "ROWS", ROWS * POSITIONS // (trace.CHUNKS + 1))


def loaded(method, name, overrides):
    return recipe.load(report.schema_of(method), f"{name}.yaml", overrides)


def drawn(method, chosen, gpu=False, dtype=torch.float32):
    """The step of a recipe, in shapes."""
    target = trace.target_without_values(chosen.target, dtype)
    with trace.shapes_only():
        model, objective = method.build_untrained(chosen, target)
    return trace.Step(model, objective, target, gpu)


def packed(target, rows, positions, taps):
    """A batch of two documents a row, with the target's features where taps are given."""
    half = positions // 2
    batch = {
        "input_ids": torch.randint(40, (rows, positions)),
        "position_ids": (torch.arange(positions) % half).repeat(rows, 1),
        "document": (torch.arange(positions) // half).repeat(rows, 1),
        "sample_id": torch.zeros(rows, positions, dtype=torch.int64),
        "loss_mask": torch.ones(rows, positions, dtype=torch.bool),
    }
    if taps is not None:
        batch["hidden"] = torch.randn(rows, positions, target.hidden_size, dtype=target.dtype)
    if taps:
        batch["taps"] = torch.randn(rows, positions, len(taps), target.hidden_size, dtype=target.dtype)
    return batch


def measured(file, method, chosen, shape=(ROWS, POSITIONS), *, autocast=False, holding=False, taps=None, releasing=False):
    """Peak bytes that the profiler sees in a real forward and backward, and in the optimizer's step after it; bytes of weights, gradients and optimizer
    state. releasing: a gradient is dropped as soon as it is complete."""
    torch.manual_seed(0)
    target = Target.load(chosen.target.path, dtype=torch.float32)
    model, objective = method.build_untrained(chosen, target)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if chosen.train.weights == "bfloat16":
        optimizers.cast_trained(model, torch.bfloat16)
    optimizer = optimizers.new_optimizer(model, chosen.train)

    def backward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            objective(model, packed(target, *shape, taps)).sum.backward()

    backward()
    optimizer.step()  # the optimizer state is there from now on
    gradients = sum(parameter.grad.nbytes for parameter in trained)
    optimizer_state = sum(tensor.nbytes for state in optimizer.state.values() for name, tensor in state.items() if name != "step")
    if not holding:
        optimizer.zero_grad()
    if releasing:
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    gc.collect()  # what an earlier profile saw allocated would count as freed in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("backward"):
            backward()
        with record_function("step"):
            optimizer.step()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    ends = {event["name"]: event["ts"] + event["dur"] for event in events if event.get("cat") == "user_annotation"}
    live, peaks = 0, {"backward": 0, "step": 0}
    for time, size in changes:
        live += size
        part = "backward" if time <= ends["backward"] else "step"
        peaks[part] = max(peaks[part], live)
    assert len(changes) > 100 and peaks["backward"] > 0
    print(peaks, file.name)
    own = {id(parameter) for parameter in target.model.parameters() if not parameter.requires_grad}
    return peaks, sum(each.nbytes for each in model.parameters() if id(each) not in own), gradients, optimizer_state


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in CASES])
def test_a_traced_step_takes_what_a_real_one_takes(name, tmp_path):
    method, file, overrides = CASES[name]
    chosen = loaded(method, file, [*overrides, f"data.seq_len={POSITIONS}", f"train.batch_size={ROWS}"])
    peaks, weights, gradients, optimizer_state = measured(tmp_path / "trace.json", method, chosen)
    run = PlannedRun(chosen, method, CPU)
    # Where heads are tied, a chunk of their loss has rows of all of them, more than are traced.
    tolerance = 0.05 if method is mlp else 0.01
    estimate = run.estimates()[0]
    (traced,) = run.traces.values()
    assert traced.peak == pytest.approx(peaks["backward"], rel=tolerance)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (weights, gradients, optimizer_state)
    assert estimate.gradients + estimate.activations == pytest.approx(max(peaks.values()), rel=tolerance)
    target = Target.load("tiny", dtype=torch.float32, layers=chosen.needs_target_layers).model
    assert estimate.target == sum(tensor.nbytes for tensor in (*target.parameters(), *target.buffers()) if not tensor.is_meta)


# On a CPU matmuls in bf16 take scratch of 2 MB that no operation shows.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("way", "within"),
    [({"autocast": True}, 0.12), ({"holding": True}, 0.01), ({"releasing": True}, 0.01), ({"taps": (1, 3, 5)}, 0.01)],
)
@pytest.mark.parametrize(
    ("name", "shape"), [("medusa by KL", (ROWS, POSITIONS)), ("eagle3", (ROWS, POSITIONS)), ("distill, random", (1, 16))]
)
def test_so_it_does_in_half_precision_and_accumulating_and_from_a_store(name, shape, way, within, tmp_path):
    method, file, overrides = CASES[name]
    chosen = loaded(method, file, overrides)
    if "autocast" in way and method is not distill:  # matmuls in bf16 take several times those in fp32 on many a CPU
        shape = ROWS // 2, POSITIONS // 2
    taps = way.get("taps") and (way["taps"] if method is eagle else ())
    peaks, *_ = measured(tmp_path / "trace.json", method, chosen, shape, **way | {"taps": taps})
    traced = drawn(method, chosen).run(*shape, autocast="autocast" in way, taps=taps)
    # A gradient that is added to an earlier one is gone too.
    assert (traced.released_peak if way.keys() & {"releasing", "holding"} else traced.peak) == pytest.approx(peaks["backward"], rel=within)
    if method is distill:  # a short row: gradients are most of it
        assert traced.released_peak < 0.8 * traced.peak


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["medusa by KL", pytest.param("eagle3", marks=pytest.mark.slow), "distill, LoRA"])
def test_bf16_weights_take_what_a_real_run_takes(name, kind, tmp_path):
    method, file, overrides = CASES[name]
    rows, positions = shape = ROWS // 2, POSITIONS // 2  # as in the test above
    keys = [*overrides, f"data.seq_len={positions}", f"train.batch_size={rows}", f"train.optimizer={kind}"]
    half = loaded(method, file, [*keys, "train.weights=bfloat16"])
    peaks, weights, gradients, optimizer_state = measured(tmp_path / "trace.json", method, half, shape, autocast=True)
    run = PlannedRun(half, method, CPU)
    (estimate,) = run.estimates()
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (weights, gradients, optimizer_state)
    assert gradients == 2 * run.trained and weights == 2 * run.trained + 4 * run.frozen
    assert estimate.gradients + estimate.activations == pytest.approx(peaks["backward"], rel=0.12)  # bf16 on a CPU, as above
    full = PlannedRun(loaded(method, file, keys), method, CPU).estimates()[0]
    if kind == "adamw":
        assert optimizer_state == 8 * run.trained == full.optimizer
    assert [each.launcher for each in PlannedRun(half, method, Machine(gpus=rows)).estimates()] == ["ddp"]


@pytest.mark.parametrize("name", ["medusa by KL", "eagle3, small vocabulary, checkpointing"])
def test_chunks_that_are_not_run_would_take_no_more(name, monkeypatch):
    method, file, overrides = CASES[name]
    step = drawn(method, loaded(method, file, overrides))
    options = {"autocast": False, "taps": None}
    few = step.run(ROWS, POSITIONS, **options)
    monkeypatch.setattr(trace, "CHUNKS", 1000)
    every = step.run(ROWS, POSITIONS, **options)
    assert (few.peak, few.released_peak) == (every.peak, every.released_peak)
    assert few.flops < every.flops


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_memory_of_other_architectures_is_linear_in_the_row(name, tmp_path):
    zoo.CONFIGS[name]().save_pretrained(tmp_path)
    chosen = loaded(medusa, "medusa-tiny", [f"target.path={tmp_path}"])
    step = drawn(medusa, chosen, gpu=True, dtype=torch.bfloat16)
    assert step.target._head.plain == Target.wrap(zoo.tiny(name))._head.plain
    one, two, four = (step.run(1, 4096 * n, autocast=True, taps=None).peak for n in (4, 8, 16))
    assert four - two == 2 * (two - one) > 0


def test_flops_are_those_of_the_matrices():
    chosen = loaded(medusa, "medusa-tiny", [])
    step = drawn(medusa, chosen)
    config = step.target.config
    size, vocabulary, heads = config.hidden_size, config.vocab_size, chosen.medusa.heads
    layers = sum(weight.numel() for layer in step.target.layers for weight in layer.parameters() if weight.dim() == 2)
    # Forward 2 a weight. A head's output: and the gradients of its input and of itself. Its block reads what needs no gradient.
    wanted = 2 * layers + 2 * size * vocabulary + heads * (6 * size * vocabulary + 4 * size * size)
    linear, attention = step.flops_per_token(1000, None)
    # One row more finds what is behind the target's head; older transformers make rotary angles by a matmul.
    assert linear == pytest.approx(wanted + 2 * size * vocabulary / 1000, rel=1e-5)
    assert attention == config.num_hidden_layers * 2 * size * 1000


def test_blocks_at_a_fixed_number_of_anchors_cost_what_they_read():
    """32 rows of 4 in each sequence: what a longer one adds is linear, also where the rows are more than the positions."""
    step = drawn(dflash, loaded(dflash, "dflash-tiny", ["dflash.anchors=32", "dflash.block_size=4"]))
    taps = tuple(step.model.taps)
    flops = [positions * sum(step.flops_per_token(positions, taps)) for positions in (64, 512, 1024, 2048)]
    assert 0 < flops[0] < flops[1] and flops[3] - flops[2] == pytest.approx(2 * (flops[2] - flops[1]), rel=0.02)


def llama(folder, size):
    """A folder with the config of Llama-3.1-8B or -70B, and nothing else."""
    big = size == 70
    LlamaConfig(
        vocab_size=128256,
        hidden_size=8192 if big else 4096,
        intermediate_size=28672 if big else 14336,
        num_hidden_layers=80 if big else 32,
        num_attention_heads=64 if big else 32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return f"target.path={folder}"


def test_of_large_targets_only_the_config_is_read(tmp_path):
    plan = report.report("eagle3-llama3.1-8b.yaml", [llama(tmp_path, 8)], Machine(8))
    assert plan["target"]["parameters"] == 8_030_261_248
    assert plan["chosen"] == "ddp" and plan["step"]["accumulation"] == 2
    # fc, a layer that reads twice as much, the head over 32,000 tokens, norms.
    size = 4096
    drafter = 3 * size * size + 2 * size * (size + 2 * 1024) + size * size + 3 * size * 14336 + 32000 * size + 4 * size
    assert plan["drafter"] == {"trained": drafter, "frozen": 0}
    assert plan["launchers"][0]["target"] == pytest.approx(2 * 8_030_261_248, abs=1e3)


@pytest.mark.slow
def test_rows_of_131072_tokens_take_memory_in_proportion(tmp_path):
    chosen = loaded(eagle, "eagle3-llama3.3-70b", [llama(tmp_path, 70), "features.mode=online"])
    step = drawn(eagle, chosen, gpu=True, dtype=torch.bfloat16)
    assert sum(one.numel() for one in step.target.model.parameters()) == 70_553_706_496
    options = {"autocast": True, "taps": None}
    one, two, four = (step.run(1, n << 10, **options).peak for n in (32, 64, 128))
    assert four - two == 2 * (two - one) > 0


@pytest.mark.slow
def test_rows_shared_out_over_ranks_take_less_of_each():
    stored = ["data.seq_len=512", "features.mode=offline", "features.store=none", "train.batch_size=8"]
    one, two = (PlannedRun(loaded(eagle, "eagle3-tiny", [*stored, f"train.context_parallel={n}"]), eagle, Machine(4)) for n in (1, 2))
    assert (one.micro, two.micro) == (2, 4) and one.ranks == two.ranks == 4
    alone, shared = (run.estimates()[0].activations / run.micro for run in (one, two))
    assert alone / 2 < shared < 0.75 * alone
    # The same matmuls, but for a few rows of the target's head; attention is that of the last rank, which sees more than the mean.
    assert one.flops_per_token() < two.flops_per_token() < 1.2 * one.flops_per_token()


def test_pieces_add_up_to_the_complete_run(tmp_path):
    tiny = loaded(medusa, "medusa-tiny", ["train.batch_size=8", "data.seq_len=16"])
    complete = PlannedRun(tiny, medusa, Machine(1)).estimates()[0]
    for gpus, nodes in ((2, 1), (4, 2)):
        ranks = gpus * nodes
        by = {estimate.launcher: estimate for estimate in PlannedRun(tiny, medusa, Machine(gpus, nodes)).estimates()}
        assert [*by] == list(memory.SEVERAL)
        assert (by["ddp"].weights, by["ddp"].optimizer) == (complete.weights, complete.optimizer)
        for name in ("fsdp2", "zero2", "zero3"):
            assert by[name].optimizer * ranks == complete.optimizer
        assert by["zero2"].gradients * ranks == by["zero3"].gradients * ranks == complete.gradients
        # What a step reads, and pieces: FSDP2's weights, ZeRO's masters, and ZeRO-3's weights beside them.
        assert by["fsdp2"].weights == by["zero2"].weights == complete.weights + complete.weights / ranks
        assert by["zero3"].weights == by["zero2"].weights + complete.weights / ranks
        for name in ("zero2-offload", "zero3-offload"):
            assert by[name].gradients == by[name].optimizer == 0 and by[name].weights == complete.weights
            assert by[name].host > by["zero2"].host > 0


@pytest.mark.parametrize(("layout", "layers"), [("none", 32), ("shard", 32 / 4 + 2), ("tensor", 32 / 4), ("layers", 32 / 4)])
def test_a_target_in_pieces_keeps_its_ends_complete(layout, layers, tmp_path):
    run = PlannedRun(loaded(eagle, "eagle3-llama3.1-8b", [llama(tmp_path, 8), f"target.parallel={layout}"]), eagle, Machine(4))
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    ends = 2 * (2 * 128256 * 4096 + 4096)
    assert run.target_bytes == pytest.approx(ends + layers * layer, abs=1e3)  # rotary frequencies aside
    assert run.loading_bytes == (pytest.approx(32 * layer + ends, abs=1e3) if layout == "shard" else 0)
    assert run.ranks == (1 if layout == "layers" else 4)


OFFLINE = ["features.mode=offline", "features.store=none", "train.tau_prompts=0", "train.patience=0"]


@pytest.mark.parametrize(("method", "file"), [(medusa, "medusa-tiny"), (eagle, "eagle3-tiny"), (distill, "distill-tiny")])
def test_offline_training_counts_the_target_s_ends_alone(method, file):
    """As many bytes as the run loads."""
    keys = ["student.start=random", "student.layers=2"] if method is distill else []
    run = PlannedRun(loaded(method, file, [*OFFLINE, *keys]), method, CPU)
    target = Target.load("tiny", dtype=torch.float32, layers=False)
    memory_of = {id(tensor): tensor.nbytes for tensor in (*target.model.parameters(), *target.model.buffers()) if not tensor.is_meta}
    assert run.target_bytes == run.estimates()[0].target == sum(memory_of.values()) > 0 and not run.has_layers
    assert run.target_bytes < 0.5 * PlannedRun(loaded(method, file, keys), method, CPU).target_bytes
    probed = PlannedRun(loaded(method, file, [*OFFLINE, *keys, "train.tau_prompts=1"]), method, CPU)
    assert probed.has_layers and probed.target_bytes > 2 * run.target_bytes


@pytest.mark.parametrize("keys", [[], ["target.parallel=shard"], ["target.parallel=tensor"], ["target.quantise=bnb-nf4"]])
def test_without_layers_the_layout_changes_nothing(keys, tmp_path):
    size = llama(tmp_path, 8)
    run = PlannedRun(loaded(eagle, "eagle3-llama3.1-8b", [size, *OFFLINE, *keys]), eagle, Machine(4))
    assert (run.target_bytes, run.loading_bytes) == (2 * 2 * 128256 * 4096, 0)
    plan = report.report("eagle3-llama3.1-8b.yaml", [size, *OFFLINE, *keys], Machine(4))
    assert plan["target"]["layers"] is False and plan["target"]["parameters"] == 8_030_261_248
    assert plan["launchers"][0]["target"] == run.target_bytes


@pytest.mark.parametrize("kind", ["bnb-nf4", "bnb-int8", "ao-int8"])
def test_quantised_targets_take_what_the_libraries_make_of_them(kind):
    pytest.importorskip("bitsandbytes" if kind.startswith("bnb") else "torchao")
    target = Target.load("tiny", dtype=torch.bfloat16, quantise=kind)
    bytes_of = 0
    for tensor in {id(one): one for one in (*target.model.parameters(), *target.model.buffers())}.values():
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if hasattr(tensor, "__tensor_flatten__") else [tensor]
        bytes_of += sum(one.nbytes for one in inner)
        state = getattr(tensor, "quant_state", None)
        bytes_of += 0 if state is None else state.absmax.nbytes
    chosen = loaded(medusa, "medusa-tiny", [f"target.quantise={kind}", "target.dtype=bfloat16"])
    assert PlannedRun(chosen, medusa, CPU).target_bytes == pytest.approx(bytes_of, rel=0.02)
    assert PlannedRun(loaded(medusa, "medusa-tiny", ["target.dtype=bfloat16"]), medusa, CPU).target_bytes > 1.3 * bytes_of


@pytest.mark.slow
def test_what_helps_a_recipe_that_does_not_fit():
    overrides = ["train.micro_batch_size=2", "train.batch_size=8", "eagle.vocab_size=500", "eagle.steps=1", "data.seq_len=64"]
    machine = Machine(2, 1, 0.02 * GIB)
    plan = report.report("eagle3-tiny.yaml", overrides, machine)
    assert plan["chosen"] is None and not any(estimate["fits"] for estimate in plan["launchers"])
    least = min(estimate["total"] for estimate in plan["launchers"])
    alone = [entry for entry in plan["advice"] if len(entry["keys"]) == 1]
    keys = {key for entry in alone for key in entry["keys"]}
    assert {
        "train.context_parallel=2",
        "train.micro_batch_size=1",
        "data.seq_len=32",
        "target.parallel=shard",
        "target.quantise=bnb-nf4",
    } <= keys
    assert [entry["total"] for entry in alone] == sorted(entry["total"] for entry in alone)
    for entry in plan["advice"]:
        estimates = PlannedRun(loaded(eagle, "eagle3-tiny", [*overrides, *entry["keys"]]), eagle, machine).estimates()
        assert entry["total"] == min(estimate.total for estimate in estimates) < least
        assert entry["fits"] == next((estimate.launcher for estimate in estimates if estimate.total <= 0.93 * machine.memory), None)
    together = plan["advice"][-1]["keys"]
    assert len(together) >= 3 and not {"target.parallel=shard", "target.quantise=bnb-nf4"} <= set(together)
    roomy = Machine(2, 1, GIB)
    assert report.report("eagle3-tiny.yaml", overrides, roomy)["advice"] == []


def test_the_store_is_that_of_the_prepared_data(tmp_path):
    lines = "".join(json.dumps({"prompt": f"def f{n}():", "text": f"def f{n}():\n    return {n}\n" * 3}) + "\n" for n in range(60))
    (tmp_path / "text.jsonl").write_text(lines)
    overrides = [f"data.train={tmp_path / 'text.jsonl'}", f"data.cache={tmp_path}", "features.mode=offline", "features.store=none"]
    machine = Machine(1)
    before = report.report("medusa-tiny.yaml", overrides, machine, tflops=100.0)["features"]
    assert before["prepared"] is None and before["bytes"] == 716_800 * before["bytes_per_token"]
    chosen = loaded(medusa, "medusa-tiny", overrides)
    from draftsmith.data.prepare import load

    corpora = load(chosen.data.plan(), Target.load("tiny").tokenizer, chosen.data.cache, 1)
    plan = report.report("medusa-tiny.yaml", overrides, machine, hours=0.5)
    tokens = sum(len(one.ids) for one in corpora.values())
    assert plan["features"]["prepared"] == tokens and plan["features"]["bytes"] == tokens * (256 * 2 + 4)
    assert plan["features"]["read_mb_per_s"] == pytest.approx(716_800 / 1800 * 516 / 1e6)
    assert plan["work"]["wanted_tokens_per_s"] == pytest.approx(716_800 / 1800)
    online = report.report("medusa-tiny.yaml", [], machine)
    assert online["features"] is None and online["work"]["flops_per_token"] > plan["work"]["flops_per_token"]


def test_a_recipe_says_whose_it_is(tmp_path):
    for name, method in (("medusa-tiny", medusa), ("eagle1-tiny", eagle), ("distill-tiny", distill)):
        assert report.method_of(f"{name}.yaml", []) is method
    bare = "train.output: out\ntrain.steps: 3\ntrain.batch_size: 2\ntrain.lr: 0.1\n"
    for file, text, overrides, method in (
        ("mine", "student.start: random\n", [], distill),
        ("mine", "", ["eagle.steps=2"], eagle),
        ("eagle3-mine", "", [], eagle),
        ("eagle3-mine", "medusa.heads: 2\n", [], medusa),
    ):
        (tmp_path / f"{file}.yaml").write_text(bare + text)
        assert report.method_of(str(tmp_path / f"{file}.yaml"), overrides) is method
    (tmp_path / "mine.yaml").write_text(bare)
    with pytest.raises(
        ValueError, match=r"cannot tell which script trains it; expected keys of one of .*distill\.\* for train/distill\.py"
    ):
        report.method_of(str(tmp_path / "mine.yaml"), [])
    with pytest.raises(ValueError, match="cannot tell"):
        report.method_of(str(tmp_path / "mine.yaml"), ["eagle.steps=2", "medusa.heads=1"])


@pytest.mark.slow
def test_what_is_printed_fits_a_terminal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "l").mkdir()
    monkeypatch.chdir(tmp_path)
    path = llama(tmp_path / "l", 8).replace(str(tmp_path / "l"), "./l")
    exit_on_error(command.main, ["eagle3-llama3.1-8b.yaml", path, "--hours", "24", "train.steps=100"])
    text = capsys.readouterr().out
    table = [line for line in text.splitlines() if re.match(r"(launcher|ddp|fsdp2|zero)", line)]
    assert len(table) == 7 and all(len(line.rstrip()) <= 80 and line.rstrip().endswith(("fits", "yes")) for line in table)
    assert len(text.splitlines()) <= 26
    assert "accelerate launch --config_file recipes/accelerate-ddp.yaml --num_processes 8 train/eagle.py eagle3-llama3.1-8b.yaml" in text
    assert "predicted" in text and "tokens/s to end in 24 h" in text
    exit_on_error(command.main, ["medusa-tiny.yaml", "--cpu", *OFFLINE])
    assert "embeddings and head alone" in capsys.readouterr().out
    exit_on_error(command.main, ["medusa-tiny.yaml", "--cpu"])
    text = capsys.readouterr().out
    assert "MiB" in text and "accelerate-one.yaml" in text and "tokens/s" not in text and "fits" not in text
    exit_on_error(command.main, ["medusa-tiny.yaml", "--gpus", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["chosen"] == "one"
    assert span_attention.Spans.__name__ == "Spans"  # what stood in for it is gone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.yaml"], "recipe 'nothing.yaml' not found"),
        (["medusa-tiny.yaml", "--gpus", "0"], "--gpus 0: expected a number above 0"),
        (["medusa-tiny.yaml", "--gpu-memory", "-1"], "--gpu-memory -1: expected a number above 0"),
        (["medusa-tiny.yaml", "train.stepz=1"], "unknown recipe key 'train.stepz'"),
        (["medusa-tiny.yaml", "--gpus", "8"], "train.batch_size=4 cannot be cut into 8 rank(s)"),
        (["medusa-tiny.yaml", "data.seq_len=100000", "--cpu"], "longer than the target's context"),
        (["medusa-tiny.yaml", "target.path=./nowhere", "--cpu"], "no folder './nowhere'"),
        (["medusa-tiny.yaml", "target.parallel=shard", "--gpus", "1"], "this is one"),
        (["target-tiny.yaml"], "of which `plan` has no estimate"),
    ],
)
def test_mistakes_are_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as exit:
        exit_on_error(command.main, words)
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]


def test_an_unknown_flag_is_named(capsys):
    with pytest.raises(SystemExit) as exit:
        exit_on_error(command.main, ["medusa-tiny.yaml", "--colour"])
    assert exit.value.code == 2 and "--colour" in capsys.readouterr().err
