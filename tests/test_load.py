"""The load model on hand-made times, its policy and its reader, and the probes on a tiny target."""

import json
import math

import pytest
import torch
from decoding_cases import PROMPTS, relative
from load_records import CHAIN4, load_record, records, request, verifying
from zoo import tiny

from draftsmith.eval import load, load_report, probe
from draftsmith.eval.intervals import Interval
from draftsmith.eval.load import CostModel, break_even, by_batch, predict
from draftsmith.eval.load_check import check, occupancy, rounds_of, timed_batches
from draftsmith.eval.policy import best_replayed, best_static, load_policy
from draftsmith.eval.record_store import RecordStore
from draftsmith.eval.records import PositionRecord
from draftsmith.eval.replay import Replayed
from draftsmith.eval.trees import Candidates, Positions, Rounds, chain, gap
from draftsmith.inference.attention import tree_attention
from draftsmith.inference.cache import TreeCache
from draftsmith.inference.decoder import Decoder
from draftsmith.inference.draft_model import DraftModel
from draftsmith.inference.expand import DynamicTree
from draftsmith.inference.hybrid import Hybrid
from draftsmith.inference.lookup import Ngram
from draftsmith.inference.policy import LoadPolicy, PolicyDepth
from draftsmith.inference.sampler import Sampling
from draftsmith.inference.stopping import Stopping
from draftsmith.inference.tree import StaticTree
from draftsmith.models.target import Target


@pytest.fixture(scope="module")
def model():
    return CostModel(load_record())


def of(tau, nodes, depth, prompts=1):
    """Rounds of one size, with this τ in every prompt."""
    return Rounds(torch.full((prompts,), 100.0 * tau), torch.full((prompts,), 100.0), {nodes: 100 * prompts}, depth)


def test_measured_loads_cost_what_was_measured(model):
    for batch in (1, 2, 8):
        for context in (100, 400):
            for nodes in (1, 2, 8, 16):
                assert model.verifying(batch, nodes, context) == pytest.approx(1 + 0.02 * batch * (nodes - 1))
            # Two of five repeats were disturbed, all sizes in them: the ratio does not see it, and the median time neither.
            assert model.plain_seconds(batch, context) == pytest.approx(1.05 * verifying(batch, context, 1))
    assert model.batches == [1, 2, 8] and model.contexts == [100, 400]


def test_loads_between_are_interpolated_and_others_refused(model):
    assert model.verifying(1, 5, 250) == pytest.approx(1.08)
    assert model.verifying(5, 8, 100) == pytest.approx((model.verifying(2, 8, 100) + model.verifying(8, 8, 100)) / 2)
    assert model.verifying(1, 2, 7) == model.verifying(1, 2, 100)  # shorter than the shortest
    with pytest.raises(ValueError, match="got batch 9; expected 1 to 8"):
        model.plain_seconds(9, 100)
    with pytest.raises(ValueError, match="got context 401; expected at most 400"):
        model.plain_seconds(1, 401)
    with pytest.raises(ValueError, match="got 17 nodes; expected at most 16"):
        model.verifying(1, 17, 100)
    record = load_record()
    record["verify"] = [entry for entry in record["verify"] if entry["nodes"] < 16 or entry["batch"] == 1]
    with pytest.raises(ValueError, match="got 16 nodes; expected at most"):
        CostModel(record).verifying(1, 16, 100)


def test_drafting_at_a_batch_whose_verifying_was_left_out_does_not_count():
    record = load_record()
    record["verify"] = [entry for entry in record["verify"] if entry["batch"] < 8]
    model = CostModel(record)
    assert model.batches == [1, 2] and [model.nearest(batch) for batch in (1, 2, 8)] == [1, 2, 2]
    assert model.round(2, 5, 4, 100) == pytest.approx(
        (1 + 0.02 * 2 * 4 + 0.4 / 1.05 + 0.05) / 1.05
    )  # drafting takes the seconds of batch 1


def test_a_round_is_drafting_verifying_and_the_rest(model):
    for batch in (1, 8):
        c, draft = 1 + 0.02 * batch * 4, 0.4
        assert model.round(batch, 5, 4, 100) == pytest.approx((c + draft + 0.05) / 1.05)
        assert predict(model, of(2.0, 5, 4), batch, 100).speedup == pytest.approx(2.0 * 1.05 / (c + draft + 0.05))
        # Drafting takes the same seconds at a longer context, where a plain round takes longer.
        longer = draft * verifying(batch, 100, 1) / verifying(batch, 400, 1)
        assert model.round(batch, 5, 4, 400) == pytest.approx((c + longer + 0.05) / 1.05)
    assert model.round(1, 1, 0, 100) == pytest.approx(1.0)  # a plain round
    assert model.round(1, 3, 2, 100) == pytest.approx((1.04 + 0.2 + 0.05) / 1.05)  # a depth that was not timed


def test_a_batch_verifies_as_many_nodes_as_its_largest_tree(model):
    """Half of the look-ups give nothing, the others 7 nodes: of 8 slots hardly ever none drafts."""
    rounds = Rounds(torch.tensor([150.0]), torch.tensor([100.0]), {1: 50, 8: 50}, 4)
    one, eight = (model.of_rounds(rounds, batch, 100) for batch in (1, 8))
    assert one == pytest.approx((model.round(1, 1, 4, 100) + model.round(1, 8, 4, 100)) / 2)
    none = 0.5**8
    assert eight == pytest.approx(none * model.round(8, 1, 4, 100) + (1 - none) * model.round(8, 8, 4, 100))


def test_intervals_join_those_of_tau_and_of_the_probe(model, monkeypatch):
    monkeypatch.setattr(Rounds, "interval", property(lambda self: Interval(2.0, 1.8, 2.4)))
    steady = predict(model, of(2.0, 8, 4), 1, 100)  # all repeats agree on the ratio
    assert steady.low == pytest.approx(steady.speedup * 0.9) and steady.high == pytest.approx(steady.speedup * 1.2)
    noisy = load_record()
    for entry in noisy["verify"]:
        if entry["nodes"] == 8:
            entry["seconds"] = [value * (1 + 0.1 * (i - 2)) for i, value in enumerate(entry["seconds"])]
    wide = predict(CostModel(noisy), of(2.0, 8, 4), 1, 100)
    assert wide.speedup == pytest.approx(steady.speedup)
    half = math.log(1 / 0.8)  # of five values the extremes
    assert wide.low == pytest.approx(wide.speedup * math.exp(-math.hypot(math.log(1 / 0.9), half)))
    monkeypatch.undo()
    assert predict(model, of(2.0, 8, 4), 1, 100).low is None  # one prompt


@pytest.mark.parametrize(
    ("speedups", "break_even", "says"),
    [
        ([1.3, 1.1], None, "faster at each of them"),
        ([0.9, 1.1], None, "faster at the largest of them"),
        ([1.3, 0.9], 2, "as fast as plain decoding from batch 2 on"),
    ],
)
def test_the_curve_says_where_drafting_pays(speedups, break_even, says):
    curve = {"batches": [1, 2], "speedup": speedups, "break_even": break_even}
    assert says in load_report.lines({"by_batch": curve, "context": 8, "policy": None, "gap": None, "check": None})[0]


def test_break_even_is_the_least_batch_from_which_on_nothing_pays(model, monkeypatch):
    rounds = of(2.0, 8, 4)
    expected = next(batch for batch in range(1, 9) if 2.0 <= model.round(batch, 8, 4, 100))
    assert 2 < expected < 8 and break_even(model, rounds, 100) == expected
    assert predict(model, rounds, expected - 1, 100).speedup > 1 >= predict(model, rounds, expected, 100).speedup
    curve = by_batch(model, of(4.0, 8, 4), 100)
    assert curve["break_even"] is None and curve["batches"] == [1, 2, 8] and curve["low"] == [None] * 3
    assert curve["speedup"] == [pytest.approx(4.0 / model.round(batch, 8, 4, 100)) for batch in (1, 2, 8)]
    assert break_even(model, of(1.0, 8, 4), 100) == 1
    monkeypatch.setattr(load, "predict_speedup", lambda model, rounds, batch, *_: {1: 0.9, 2: 1.1}.get(batch, 0.8))
    assert break_even(model, rounds, 100) == 3, "batch 1 does not pay, batch 2 does"


def test_slots_are_taken_by_those_that_wait():
    assert occupancy([3, 1, 2, 2], 2) == {2: 3, 1: 2}  # 3 beside 1 and then beside 2, then 2 alone
    assert occupancy([5, 1], 2) == {2: 1, 1: 4}
    assert occupancy([4, 4, 4], 1) == {1: 12}
    assert occupancy([], 3) == {}


def positions(seed, prompts, ranks=3, depth=3, length=40, domain="d", choosing=False):
    generator = torch.Generator().manual_seed(seed)
    chance = torch.tensor([0.6, 0.2, 0.1, 0.1])
    made = []
    for prompt in range(prompts):
        draw = torch.multinomial(chance, length * depth, True, generator=generator).view(length, depth)
        draw = torch.where(draw == ranks, -1, draw)
        made.append(PositionRecord(f"{domain}{seed}-{prompt}", domain, draw, draw.float(), choosing=choosing))
    return made


def test_the_policy_takes_at_each_batch_what_pays_most(model):
    choosing, reported = positions(1, 10, choosing=True), positions(2, 10)
    policy = load_policy(model, best_static(model, choosing, reported, 100, 16), 100)
    candidates = Candidates(choosing, 16)
    read = LoadPolicy(json.loads(json.dumps(policy)))
    sizes = []
    for batch in range(1, 9):
        entry, cost = read.policy_for(batch), model.relative(batch, 100)
        best = max(candidates.rounds, key=lambda paths: candidates.rounds[paths].tau / cost(len(paths) + 1, candidates.rounds[paths].depth))
        assert set(entry.tree.paths) == set(best)
        speedups = [candidates.positions.rounds(chain(k)).tau / cost(k + 1, k) for k in range(4)]
        assert entry.chain == speedups.index(max(speedups))
        sizes.append(entry.tree.num_nodes)
    assert sizes[0] > sizes[-1], "a larger batch takes smaller trees"
    for entry in policy["entries"]:
        tau = Positions(reported).rounds([tuple(path) for path in entry["tree"]]).tau
        assert entry["tau"] == pytest.approx(tau) and entry["low"] < entry["speedup"] < entry["high"]
    assert read.policy_for(9).tree.num_nodes == 1 and read.policy_for(9).chain == 0  # was not measured


def test_where_nothing_pays_drafting_is_off():
    dear = CostModel(load_record(draft=9.0))
    policy = load_policy(dear, best_static(dear, positions(1, 4), positions(2, 4), 100, 16), 100)
    (entry,) = policy["entries"]
    assert (entry["from"], entry["to"], entry["tree"], entry["num_speculative_tokens"]) == (1, 8, [], 0)
    assert entry["tau"] == entry["speedup"] == 1.0


def test_the_decoder_follows_a_policy(tmp_path):
    entries = [
        {"from": 1, "to": 1, "tree": [[0], [0, 0], [0, 0, 0]], "num_speculative_tokens": 3},
        {"from": 2, "to": 2, "tree": [[0]], "num_speculative_tokens": 1},
    ]
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"format": 1, "kind": "load policy", "entries": entries}))
    target = Target.wrap(tiny("llama"))
    plain = [answer.tokens for answer in Decoder(target).generate(PROMPTS[:3], None, 24, ())]
    drafter = DraftModel(relative("llama"), StaticTree.chain(4))
    policy = LoadPolicy.read(file)
    for slots, sizes in ((1, {4}), (2, {2, 4}), (3, {1})):  # of three requests the last decodes alone where there are two slots
        out = Decoder(target, drafter, slots=slots, adaptive=PolicyDepth(policy)).generate(PROMPTS[:3], None, 24, ())
        assert [answer.tokens for answer in out] == plain
        assert {each.size for answer in out for each in answer.rounds} == sizes


@pytest.mark.parametrize(
    "content, message",
    [
        ({"kind": "load policy", "format": 2, "entries": []}, "not a load policy of format 1"),
        ({"kind": "load policy", "format": 1, "entries": {}}, "`entries` should be a list"),
        ({"kind": "load policy", "format": 1, "entries": [3]}, "an entry is no object"),
        ({"kind": "load policy", "format": 1, "entries": [{"from": 2, "to": 3}]}, "expected one from 1 on"),
        ({"kind": "load policy", "format": 1, "entries": [{"from": 1, "to": 1, "tree": [[1, 0]]}]}, "without its prefix"),
    ],
)
def test_a_damaged_policy_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        LoadPolicy(content)


def test_the_best_replayed_tree_by_batch(model):
    """Chosen by the rounds on one half of the prompts, reported with those on the other."""
    taus = {1: (1.4, 1.45), 4: (1.9, 1.7)}
    drafts = [Replayed(StaticTree.chain(k), of(chooses, k + 1, k), of(reported, k + 1, k)) for k, (chooses, reported) in taus.items()]
    policy = load_policy(model, best_replayed(model, drafts, 100), 100)
    read = LoadPolicy(json.loads(json.dumps(policy)))
    for batch in range(1, 9):
        speedups = {k: chooses / model.round(batch, k + 1, k, 100) for k, (chooses, _) in taus.items()}
        best = max(speedups, key=speedups.get)
        assert read.policy_for(batch).tree.max_depth == read.policy_for(batch).chain == (best if speedups[best] > 1 else 0)
    for entry in policy["entries"]:
        assert entry["tau"] == pytest.approx(taus[entry["depth"]][1] if entry["depth"] else 1.0)
    off = [Replayed(StaticTree.chain(1), of(1.0, 2, 1), of(3.0, 2, 1))]
    (entry,) = load_policy(model, best_replayed(model, off, 100), 100)["entries"]
    assert (entry["tree"], entry["num_speculative_tokens"], entry["speedup"]) == ([], 0, 1.0)
    spec = DynamicTree(2, 2, 4)
    dynamic = [Replayed(spec, of(2.0, 4, 2), of(2.0, 4, 2))]
    (first, *_) = load_policy(model, best_replayed(model, dynamic, 100), 100)["entries"]
    assert first["tree"] == {"depth": 2, "width": 2, "nodes": 4} and first["num_speculative_tokens"] is None
    entry = LoadPolicy(load_policy(model, best_replayed(model, dynamic, 100), 100)).policy_for(1)
    assert entry.tree == spec and entry.chain is None


def test_the_check_predicts_the_work_that_was_timed():
    """Rounds that cost what the model says, and prefill as recorded: predicted is measured."""
    model = CostModel(load_record())
    committed = [[2, 2, 2], [5, 1], [3, 3, 1, 1]]
    cost, context = model.round(1, 5, 4, 100), 0
    requests = []
    for number, rounds in enumerate(committed):
        total = sum(rounds)
        context = max(context, 20 + total / 2)
        seconds = {"plain": 4.0 + total * model.plain_seconds(1, 100), "drafted": 4.0 + len(rounds) * cost * model.plain_seconds(1, 100)}
        made = request(str(number), rounds, seconds=seconds)
        for index, each in enumerate(made.rounds):
            made.rounds[index] = type(each)(each.position, 5, each.committed, 1.0, 1.0, 1.0)
        requests.append(made)
    assert context < 100  # within the shortest
    row = check(model, requests, 1, CHAIN4, 4, {"plain": 0.0, "drafted": 0.0})
    assert row["predicted"] == pytest.approx(row["measured"]) and row["error"] == pytest.approx(0.0, abs=1e-12)
    assert row["steady"] == pytest.approx(sum(map(sum, committed)) / 9 / cost) and row["steady"] > row["predicted"] > 1
    assert check(model, [], 1, CHAIN4, 4, {}) is None


def test_the_check_of_a_batch_counts_the_slots_in_use():
    model = CostModel(load_record())
    lengths = [[3, 3, 2], [4, 4], [2, 2, 2, 2], [8]]
    requests = [request(str(i), each, seconds={}, batch_tokens={}, batch=0, prefill_s=None) for i, each in enumerate(lengths[:3])]
    rounds = rounds_of([*requests, request("3", lengths[3])], 4)
    drafted = sum(
        count * model.plain_seconds(slots, 100) * model.of_rounds(rounds, slots, 100, CHAIN4)
        for slots, count in occupancy([3, 2, 4, 1], 2).items()
    )
    plain = sum(count * model.plain_seconds(slots, 100) for slots, count in occupancy([8] * 4, 2).items())
    seconds = {"plain": plain + 4 * 20 * 0.01, "drafted": drafted + 4 * 20 * 0.02}
    requests.append(request("3", lengths[3], seconds=seconds, batch_tokens={"plain": 32, "drafted": 32}, batch=4, prefill_s=None))
    assert [len(batch) for batch in timed_batches(requests)] == [4]
    row = check(model, requests, 2, CHAIN4, 4, {"plain": 0.01, "drafted": 0.02})
    assert row["predicted"] == pytest.approx(row["measured"]) and row["batch"] == 2


def test_the_optimism_of_a_choice_is_that_of_one_tree_on_two_halves():
    choosing, reported = positions(3, 2, length=12), positions(4, 2, length=12)
    cost = lambda nodes, depth: 1 + 0.03 * nodes  # noqa: E731
    best = Candidates(choosing, 16).best(cost)
    result = gap(choosing, reported, cost, 16)
    assert result.chosen_on == Positions(choosing).rounds(best).tau and result.reported_on == Positions(reported).rounds(best).tau
    assert result.optimism == result.chosen_on - result.reported_on
    # On equal halves nothing is gained by the choice, nor with the halves exchanged where they only differ.
    assert gap(choosing, choosing, cost, 16)[2:] == (0.0, 0.0)
    assert result.crossed == pytest.approx(gap(reported, choosing, cost, 16).crossed)


def test_the_report_is_made_from_records_alone(tmp_path):
    tree = [(0,), (0, 0)]
    made = [*positions(1, 9, domain="a", choosing=True), *positions(2, 9, domain="a"), *positions(5, 4, domain="b")]
    result = load_report.load_report(records([request(str(i), [2, 1, 3]) for i in range(9)], load_record(), made, tree))
    assert result["by_batch"]["batches"] == [1, 2, 8] and len(result["by_context"]) == 6
    assert [row["length"] for row in result["chains"]] == [1, 2, 3]
    assert {row["domain"] for row in result["trees"]} == {"all", "a"}, "b has no prompt that chooses"
    assert result["check"]["measured"] == pytest.approx(4.0 * 6 / (4.0 + 3.5 * 3))
    assert LoadPolicy(result["policy"]).entries and result["policy"]["drafter"]["method"] == "m"
    shown = "\n".join(load_report.lines(json.loads(json.dumps(result))))
    assert "predicted speedup by batch" in shown and "predicted against measured at batch 1" in shown and "optimism" in shown
    assert load_report.load_report(records([request("a", [1])])) == {} and load_report.lines({}) == []
    # Without position records there is no search, and the rest stays.
    bare = load_report.load_report(records([request(str(i), [2, 1, 3]) for i in range(9)], load_record(), (), tree))
    assert bare["policy"] is None and bare["gap"] is None and bare["check"] and load_report.lines(bare)


def test_the_record_outlives_the_file(tmp_path):
    store = RecordStore(tmp_path)
    settings = {"max_new_tokens": 8, "dtype": "float32", "slots": 1, "timed": None, "positions": 64}
    header = {"target": {"name": "t"}, "drafter": {"method": "m"}, "settings": settings, "skipped": {}}
    with store.opened(header) as opened:
        opened.append([{"kind": "load", **load_record()}, {"kind": "tree", "tree": [], "nodes": 1, "depth": 0}])
        opened.finish([], [])
    from draftsmith.eval.record_store import read

    assert read(tmp_path).load == json.loads(json.dumps(load_record()))


@pytest.mark.parametrize("kind", ["draft model", "lookup"])
def test_the_probe_measures_every_load(kind, monkeypatch):
    monkeypatch.setattr(probe, "MOST", 4)
    monkeypatch.setattr(probe, "ROUNDS", 12)
    target = Target.wrap(tiny("llama"))
    own = StaticTree.from_paths([(0,), (1,), (0, 0)])
    drafter = DraftModel(relative("llama"), own, stop=Stopping("confidence", 0.5)) if kind == "draft model" else Ngram(StaticTree.chain(3))
    before, lengths = drafter.tree_spec, set()
    seconds = probe._Runner.seconds

    def watched(self, batch, context, depth):
        result = seconds(self, batch, context, depth)
        lengths.add((batch, context, tuple((self.cache.length - context).tolist())))
        return result

    monkeypatch.setattr(probe._Runner, "seconds", watched)
    record = probe.measure(target, drafter, PROMPTS, Sampling(), [20, 60, 900], 6, batches=(1, 3), seconds=60)
    cells = {(each["batch"], each["context"]) for each in record["verify"]}
    assert cells == {(batch, context) for batch in (1, 3) for context in (20, 60, 121)}  # 128 positions, 6 nodes and a token
    assert {each["nodes"] for each in record["verify"]} == {1, 2, 4, 6}
    assert all(len(each["seconds"]) >= 3 and min(each["seconds"]) > 0 for each in record["verify"])
    assert all(min(more) >= 1 and len(more) == batch for batch, _, more in lengths)  # every slot committed after exactly `context`
    own_rounds = [each for each in record["rounds"] if each["nodes"] > 1 and each["tree"] == [list(path) for path in before.paths]]
    assert [each["batch"] for each in own_rounds] == [1, 3]
    assert len(record["rounds"]) == (8 if kind == "draft model" else 2)
    for each in record["rounds"]:
        assert len(each["draft"]) == len(each["verify"]) >= 10 and min(each["draft"]) > 0 and min(each["plain"]) > 0
    assert drafter.tree_spec.paths == before.paths and (kind == "lookup" or str(drafter.stop) == "confidence:0.5")
    # 2 layers, keys and values, 2 KV heads of dim 8, 4 bytes each
    assert record["kv_bytes"]["target"] == 2 * 2 * 2 * 8 * 4 and (record["kv_bytes"]["drafter"] > 0) == (kind == "draft model")
    assert kind == "lookup" or probe._drafter_bytes(Hybrid(drafter)) == record["kv_bytes"]["drafter"]
    tied = target.model.config.tie_word_embeddings
    weights = sum(each.numel() for each in target.model.parameters())
    assert record["size"]["weights"] == weights - (0 if tied else target.vocab_size * target.hidden_size)
    assert record["size"]["attention_flops"] == 4 * 2 * 4 * 8
    model = CostModel(json.loads(json.dumps(record)))
    assert predict(model, of(1.5, 4, 2), 3, 60).speedup > 0 and model.contexts == [20, 60, 121]
    assert record["left_out"] == [] and record["recurrent"] == (kind == "draft model")


def test_the_probe_runs_static_shape_rounds(monkeypatch):
    """As CUDA graphs run them; on a CPU their parts have no times."""
    monkeypatch.setattr(probe, "refusal", lambda *arguments: "")
    target = Target.wrap(tiny("llama"))
    cache = TreeCache(3, 40, target.device)
    with torch.inference_mode(), tree_attention(target.model):
        runner = probe._Runner(target, probe._Scripted(6, (), target), cache, Sampling())
        for depth in (0, 1, 5, 0):
            assert runner.seconds(3, 20, depth) == 0.0
            assert runner.graphs and all(21 <= length <= 21 + depth for length in cache.length.tolist())


def test_what_has_no_time_is_left_out_and_said():
    target = Target.wrap(tiny("llama"))
    record = probe.measure(target, Ngram(StaticTree.chain(2)), PROMPTS, Sampling(), [20, 60], 4, batches=(1, 2, 4), seconds=0.0)
    assert {(each["batch"], each["context"]) for each in record["verify"]} == {(1, 20)}  # the first is always measured
    assert "verifying for 4 at a context of 60: no time" in record["left_out"] and len(record["left_out"]) == 6
    assert CostModel(record).batches == [1]
