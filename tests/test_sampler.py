"""The sampler against transformers' generate, against the trainer's log-probs, and against itself on other chains."""

import json
import math
import random
import types
from collections import Counter

import pytest
import torch
from ranks import run_ranks, small_config, stage_of, whole_model

import sampler
from drawing import Sampling, draw, uniforms
from engines import load_engine
from rollout import choose_row_length, pack
from sampler import Link, Sampler, stop_ids
from split import plan_stages

VOCABULARY, EOS = 96, 2
KINDS = {
    "qwen2": {},
    "qwen2 windowed": dict(use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "qwen3": {},
    "llama": {},
    "mistral": dict(sliding_window=None),
    "mistral windowed": dict(sliding_window=6),
    "smollm3": {},
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
_models = {}


def model_of(kind="qwen2", **more):
    """A float32 model of hidden size 32 whose laws are far from flat, so that rounding decides nothing."""
    key = (kind, *sorted(more.items()))
    if key not in _models:
        config = small_config(kind.split()[0], initializer_range=0.15, vocabulary=VOCABULARY, **KINDS[kind], **more)
        _models[key] = whole_model(config, torch.float32)
    return _models[key]


def engine(model=None, *, device="cpu", compute_dtype=None, **more) -> Sampler:
    stage = stage_of(model or model_of(), device=device, compute_dtype=compute_dtype)
    return Sampler(stage, **({"eos_ids": {EOS}} | more))


def some_prompts(*lengths, seed=0):
    r = random.Random(seed)
    return [[r.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]


PROMPTS = some_prompts(3, 11, 1, 7, 20)


def ids_of(completions):
    return [c.ids for c in completions]


def greedy_by_transformers(model, prompt, count):
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count, do_sample=False,
        eos_token_id=EOS, pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def full_law(model, completion, temperature=1.0):
    """Log-probs of the completion's tokens in one pass of transformers' model over the whole sequence."""
    ids = torch.tensor([completion.prompt_ids + completion.ids])
    with torch.no_grad():
        law = (model(ids).logits[0, len(completion.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return law.gather(-1, torch.tensor(completion.ids)[:, None])[:, 0]


def scripted(successor: dict[int, int], vocabulary=32) -> Sampler:
    """A sampler whose model answers every token with the one that ``successor`` names."""
    stage = stage_of(whole_model(small_config(layers=1, vocabulary=vocabulary, tied=False), torch.float32))
    table = torch.full((vocabulary, vocabulary), -1e3)
    for token, following in successor.items():
        table[token, following] = 1e3
    stage.embed = lambda ids: torch.nn.functional.one_hot(ids, vocabulary).float()
    stage.run_layers = lambda hidden, *_: hidden
    stage.logits = lambda hidden: hidden @ table
    return Sampler(stage, eos_ids={EOS})


# ------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_D01_greedy_tokens_equal_transformers_for_mixed_prompt_lengths(kind, device):
    model = model_of(kind)
    sampling = Sampling(temperature=0, max_new_tokens=24, max_sequences_in_flight=5)
    out = engine(model, device=device).generate(PROMPTS, group_size=2, sampling=sampling, stream=(0,))
    assert [(c.question, c.sample, c.prompt_ids) for c in out] == [
        (q, s, prompt) for q, prompt in enumerate(PROMPTS) for s in range(2)
    ]
    for c in out:
        assert c.ids == greedy_by_transformers(model, c.prompt_ids, 24)
        assert torch.allclose(torch.tensor(c.logprobs), full_law(model, c), atol=1e-5, rtol=0)
        assert c.text == "" and c.finished == (c.ids[-1] == EOS)


@pytest.mark.parametrize("pad_id", [0, EOS, 95])
def test_D03_the_pad_id_changes_nothing(pad_id):
    arguments = dict(group_size=2, sampling=Sampling(max_new_tokens=16), stream=(0,))
    together = engine(pad_id=pad_id).generate(PROMPTS, **arguments)
    for question, prompt in enumerate(PROMPTS):
        alone = engine().generate([prompt], first_question=question, **arguments)
        assert ids_of(alone) == ids_of(together[2 * question : 2 * question + 2])


@pytest.mark.parametrize("device", DEVICES)
def test_C17_C08_logprobs_equal_the_trainers_at_the_temperature(device):
    """The trainer's way: packed rows through ``Stage.forward``, in other batch shapes than the sampler's."""
    model = model_of()
    sampling = Sampling(temperature=0.7, max_new_tokens=20, max_sequences_in_flight=8)
    completions = engine(model, device=device).generate(PROMPTS, group_size=4, sampling=sampling, stream=(3,))
    stage = stage_of(model, device=device, temperature=0.7)
    rows = pack(completions, choose_row_length(completions, 1, True)).to(device)
    with torch.no_grad():
        trainer = torch.cat([
            stage(rows.select(part).input_ids, **rows.select(part).inputs())[..., 0]
            for part in torch.arange(len(rows.input_ids)).split(2)
        ])
    assert (trainer - rows.sampler_logprob).abs().max() < 1e-5
    assert sum(len(c.ids) for c in completions) == (rows.segment_ids > 0).sum()


def test_C17_bfloat16_products_stay_close_to_the_trainers():
    model = model_of()
    completions = engine(model, compute_dtype=torch.bfloat16).generate(
        PROMPTS, group_size=4, sampling=Sampling(max_new_tokens=20), stream=(3,)
    )
    stage = stage_of(model, compute_dtype=torch.bfloat16)
    rows = pack(completions, choose_row_length(completions, 1, True))
    with torch.no_grad():
        trainer = stage(rows.input_ids, **rows.inputs())[..., 0]
    difference = (trainer - rows.sampler_logprob).abs()[rows.segment_ids > 0]
    assert 0 < difference.mean() < 0.05


def test_C08_logits_2_0_at_temperature_one_half():
    _, logprob = draw(torch.tensor([[2.0, 0.0]] * 2), torch.tensor([0.0, 0.99]).double(), Sampling(temperature=0.5))
    assert logprob.tolist() == pytest.approx([-0.0181499, -4.0181499], abs=1e-6)


# ------------------------------------------------------------------------------------------------ other chains
SCENARIOS = {  # prompts, group size, sampling
    "greedy": (PROMPTS, 1, Sampling(temperature=0, max_new_tokens=24)),
    "all at once": (PROMPTS, 4, Sampling(temperature=1.5, max_new_tokens=24)),
    "waiting": (PROMPTS, 4, Sampling(temperature=1.5, max_new_tokens=24, max_sequences_in_flight=8)),
    "groups larger than a lane": (PROMPTS, 4, Sampling(temperature=1.5, max_new_tokens=24, max_sequences_in_flight=5)),
    "one in flight": (PROMPTS[:3], 2, Sampling(temperature=1.5, max_new_tokens=8, max_sequences_in_flight=1)),
    "one prompt": (PROMPTS[:1], 6, Sampling(temperature=1.5, max_new_tokens=24)),
    "one sequence": (PROMPTS[:1], 1, Sampling(max_new_tokens=5)),
    "one token": (PROMPTS, 1, Sampling(max_new_tokens=1)),
    "nothing": ([], 2, Sampling(max_new_tokens=5)),
}
MANY_STOPS = set(range(2, VOCABULARY, 9))  # so that sequences end at very different times


def all_scenarios(sampler):
    return {
        name: sampler.generate(prompts, group_size=group, sampling=sampling, stream=(1, 2))
        for name, (prompts, group, sampling) in SCENARIOS.items()
    }


def on_a_chain(mesh, kinds):
    link = Link(mesh.pp_group, mesh.device, mesh.control_group)
    found = {}
    for kind in kinds:
        stage = stage_of(model_of(kind), mesh.stages, mesh.stage)
        found[kind] = Sampler(stage, eos_ids={EOS}, link=link).generate(
            PROMPTS, group_size=2, sampling=Sampling(temperature=0, max_new_tokens=16), stream=(0,)
        )
    stage = stage_of(model_of(), mesh.stages, mesh.stage)
    engine = Sampler(stage, eos_ids=MANY_STOPS, link=link)
    found["scenarios"] = all_scenarios(engine)
    engine.generate(PROMPTS, group_size=4, sampling=Sampling(max_new_tokens=24), stream=(1,))
    return found, engine.idle_share


@pytest.fixture(scope="module")
def expected():
    return all_scenarios(Sampler(stage_of(model_of()), eos_ids=MANY_STOPS))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_D09_T31_every_chain_gives_the_same_tokens_on_every_stage(stages, expected):
    results = run_ranks(stages, on_a_chain, KINDS if stages == 2 else ["qwen2 windowed", "smollm3"])
    for found, idle_share in results:
        assert 0 < idle_share < 1
        scenarios = found.pop("scenarios")
        assert scenarios.keys() == expected.keys()
        for name in expected:
            assert ids_of(scenarios[name]) == ids_of(expected[name]), name
            for ours, theirs in zip(scenarios[name], expected[name]):
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
                assert (ours.question, ours.sample, ours.finished) == (theirs.question, theirs.sample, theirs.finished)
        for kind, completions in found.items():
            for c in completions:
                assert c.ids == greedy_by_transformers(model_of(kind), c.prompt_ids, 16), kind


def test_sampled_tokens_do_not_depend_on_the_sequences_in_flight(expected):
    for name in ("waiting", "groups larger than a lane"):
        assert ids_of(expected[name]) == ids_of(expected["all at once"]), name
    lengths = {len(c.ids) for c in expected["all at once"]}
    assert len(lengths) > 5, "the sequences should end at different times"
    assert len({tuple(c.ids) for c in expected["all at once"]}) > 15, "samples of a group should differ"


def test_D09_T31_replicas_differ_and_a_rerun_does_not():
    arguments = dict(group_size=4, sampling=Sampling(max_new_tokens=16))
    first = ids_of(engine().generate(PROMPTS[:1], stream=(0, 7), **arguments))
    assert ids_of(engine().generate(PROMPTS[:1], stream=(0, 7), **arguments)) == first
    others = [
        ids_of(engine().generate(PROMPTS[:1], stream=(0, 7), first_question=1, **arguments)),  # another replica's
        ids_of(engine().generate(PROMPTS[:1], stream=(0, 8), **arguments)),  # the next rollout
        ids_of(engine().generate(PROMPTS[:1], stream=(1, 7), **arguments)),  # another seed
    ]
    everything = [tuple(ids) for run in (first, *others) for ids in run]
    assert len(set(everything)) == len(everything)


def test_a_longer_limit_only_continues():
    short, long = (
        engine().generate(PROMPTS, group_size=2, sampling=Sampling(max_new_tokens=n), stream=(0,)) for n in (6, 20)
    )
    assert [c.ids for c in short] == [c.ids[:6] for c in long]


# ------------------------------------------------------------------------------------------------ where it ends
def test_C04_C05_C07_T21_a_completion_ends_with_its_first_end_of_sequence_token():
    for pad_id in (0, EOS):
        sampler = scripted({10: 5, 5: 2, 11: 8, 8: 6, 6: 7, 7: 2, 2: 7})
        sampler.pad_id = pad_id
        sampling = Sampling(max_new_tokens=8)
        short, long = sampler.generate([[10], [9, 9, 11]], group_size=1, sampling=sampling, stream=(0,))
        assert (short.ids, long.ids) == ([5, 2], [8, 6, 7, 2])
        assert len(short.logprobs) == 2 and len(long.logprobs) == 4
        assert short.finished and long.finished
        rows = pack([short, long], 16, pad_id=pad_id)
        assert (rows.segment_ids > 0).sum() == 6


def test_T22_any_of_several_end_of_sequence_ids_ends_it():
    sampler = scripted({10: 5, 5: 2, 11: 6, 6: 1, 1: 7, 2: 7})
    sampler.eos_ids = frozenset({1, 2})
    out = sampler.generate([[10], [11]], group_size=1, sampling=Sampling(max_new_tokens=8), stream=(0,))
    assert ids_of(out) == [[5, 2], [6, 1]] and all(c.finished for c in out)


def test_T23_an_end_of_sequence_token_exactly_at_the_limit_is_finished():
    script = {10: 5, 5: 6, 6: 2, 2: 7}
    for limit, ids, finished in ((4, [5, 6, 2], True), (3, [5, 6, 2], True), (2, [5, 6], False)):
        (c,) = scripted(script).generate([[10]], group_size=1, sampling=Sampling(max_new_tokens=limit), stream=(0,))
        assert (c.ids, c.finished) == (ids, finished)


def test_D04_the_stop_set_is_the_union_of_generation_config_model_config_and_tokenizer(tmp_path):
    config, tokenizer = small_config(), types.SimpleNamespace(eos_token_id=13)
    config.eos_token_id = 11
    assert stop_ids(str(tmp_path), config, tokenizer) == {11, 13}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    assert stop_ids(str(tmp_path), config, tokenizer) == {11, 12, 13}
    config.eos_token_id = None
    assert stop_ids(str(tmp_path), config, types.SimpleNamespace(eos_token_id=None)) == {11, 12}
    sampler = scripted({10: 5, 5: 6, 6: 7, 7: 8, 8: 13, 13: 14})
    sampler.eos_ids = frozenset(stop_ids(str(tmp_path), config, tokenizer))
    (c,) = sampler.generate([[10]], group_size=1, sampling=Sampling(max_new_tokens=9), stream=(0,))
    assert c.ids == [5, 6, 7, 8, 13] and c.finished


def test_stop_ids_and_stop_strings_of_a_call():
    text = {5: "x", 6: " en", 7: "d. ", 8: "y", 2: "</s>"}
    script = {10: 5, 5: 6, 6: 7, 7: 8, 8: 2, 11: 6}
    prompts = [[10], [11]]
    for sampling, ids in (
        (Sampling(max_new_tokens=9, stop_ids=(6,)), [[5, 6], [6]]),
        (Sampling(max_new_tokens=9, stop_strings=("end.",)), [[5, 6, 7], [6, 7]]),
        (Sampling(max_new_tokens=9, stop_strings=("never", "xe", "y")), [[5, 6, 7, 8], [6, 7, 8]]),
        (Sampling(max_new_tokens=9, stop_strings=("10", "never")), [[5, 6, 7, 8, 2], [6, 7, 8, 2]]),
        (Sampling(max_new_tokens=9, stop_strings=("end.",), min_new_tokens=3), [[5, 6, 7], [6, 7, 8]]),
    ):
        sampler = scripted(script)
        sampler.decode = lambda ids: "".join(text[i] for i in ids)
        out = sampler.generate(prompts, group_size=1, sampling=sampling, stream=(0,))
        assert ids_of(out) == ids and all(c.finished for c in out)


def test_min_new_tokens_bans_every_stop_but_the_logprobs_stay_those_of_the_full_law():
    model = model_of()
    sampling = Sampling(temperature=1.5, max_new_tokens=12, min_new_tokens=6, stop_ids=(3,))
    out = engine(model, eos_ids=MANY_STOPS).generate(PROMPTS, group_size=8, sampling=sampling, stream=(0,))
    stops = MANY_STOPS | {3}
    assert all(not stops & set(c.ids[:5]) for c in out)
    assert min(len(c.ids) for c in out) == 6, "a stop at the sixth token is allowed"
    for c in out[::5]:
        assert torch.allclose(torch.tensor(c.logprobs), full_law(model, c, 1.5), atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------ the law
def chi_square(counts, law):
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, law))


def test_tokens_follow_the_law():
    """For 4 degrees of freedom chi-square passes 18.5 once in a thousand seeds."""
    law = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.05, 0.05, 0.0])
    uniform = torch.tensor(uniforms((0,), 0, 0, 20000))
    token, logprob = draw(law.log().expand(20000, -1), uniform, Sampling())
    counts = token.bincount(minlength=7)
    assert counts[1] == counts[6] == 0
    assert chi_square(counts[law > 0].tolist(), law[law > 0].tolist()) < 18.5
    assert torch.allclose(logprob.float(), law.log()[token])


def test_the_whole_sampler_follows_the_models_law():
    """First and second token of 4000 samples of one prompt; chi-square has mean 95 and deviation 14."""
    model, count = model_of(), 4000
    prompt, temperature = PROMPTS[0], 2.0
    sampling = Sampling(temperature=temperature, max_new_tokens=2, max_sequences_in_flight=count)
    out = engine(model, eos_ids=set()).generate([prompt], group_size=count, sampling=sampling, stream=(5,))
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
        both = model(torch.tensor([[*prompt, t] for t in range(VOCABULARY)])).logits[:, -1] / temperature
    second = first @ both.softmax(-1)
    for place, law in enumerate((first, second)):
        found = Counter(c.ids[place] for c in out)
        likely = [t for t in range(VOCABULARY) if law[t] * count >= 5]
        rest = 1 - sum(law[t].item() for t in likely)
        counts = [found[t] for t in likely] + [count - sum(found[t] for t in likely)]
        statistic = chi_square(counts, [law[t].item() for t in likely] + [rest])
        freedom = len(likely)
        assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_a_token_of_probability_0_is_never_drawn():
    ends = torch.tensor([0.0, 5e-324, 0.5, 1 - 2**-53]).double()
    never = float("-inf")
    for row, allowed in (
        ([never, 0.0, never, 0.0, never], {1, 3}),
        ([never, never, never, never, 3.0], {4}),
        ([-7.0, never, never, never, never], {0}),
        ([never, 0.0, -300.0, -300.0, -300.0], {1}),  # exp(-300) is 0 in float32
    ):
        token, _ = draw(torch.tensor([row]).expand(4, -1), ends, Sampling())
        assert set(token.tolist()) == allowed
    # Many small steps: their sums round, and the last number before 1 still has to find a token.
    token, _ = draw(torch.zeros(4, 100_003), ends, Sampling(temperature=0.3))
    assert token.tolist() == [0, 0, 50_001, 100_002]
    # Every border between tokens of a law with gaps, and its neighbours.
    law = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0))
    law[law < 0.5] = 0
    border = law.double().cumsum(-1)[0] / law.double().sum()
    near = torch.cat([border.nextafter(torch.zeros(1).double()), border, border.nextafter(torch.ones(1).double())])
    near = near[near < 1]
    token, _ = draw(law.log().expand(len(near), -1), near, Sampling())
    assert (law[0, token] > 0).all()
    exact = torch.searchsorted(border, near, right=True).clamp(max=999)
    rank = (law[0] > 0).long().cumsum(0)  # exp(log p) rounds, so a border may lie on either side of its neighbours
    assert (rank[token] - rank[exact]).abs().max() <= 1


def test_D06_top_k():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]]).expand(2000, -1)
    uniform = torch.tensor(uniforms((0,), 0, 0, 2000))
    drawn = {k: draw(logits, uniform, Sampling(top_k=k))[0] for k in (0, 1, 2, 5, 50)}
    assert torch.equal(drawn[50], drawn[0]) and torch.equal(drawn[5], drawn[0])
    assert set(drawn[0].tolist()) == {0, 1, 2, 3, 4}
    assert set(drawn[2].tolist()) == {1, 3} and set(drawn[1].tolist()) == {1}
    assert (drawn[2] == 1).double().mean() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    with pytest.raises(ValueError, match="top_k -1"):
        Sampling(top_k=-1)


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.1]]).log().expand(2000, -1)
    uniform = torch.tensor(uniforms((0,), 0, 0, 2000))
    everything = {0, 1, 2, 3}
    for p, kept in ((1e-9, {1}), (0.49, {1}), (0.51, {1, 2}), (0.79, {1, 2}), (0.95, everything), (1.0, everything)):
        assert set(draw(logits, uniform, Sampling(top_p=p))[0].tolist()) == kept, p
    assert set(draw(logits, uniform, Sampling(top_k=3, top_p=0.5))[0].tolist()) == {1}


def test_D11_logprobs_are_those_of_the_full_law_whatever_is_cut():
    model = model_of()
    sampling = Sampling(temperature=0.8, top_k=2, top_p=0.9, max_new_tokens=8)
    for c in engine(model).generate(PROMPTS, group_size=2, sampling=sampling, stream=(0,)):
        assert torch.allclose(torch.tensor(c.logprobs), full_law(model, c, 0.8), atol=1e-5, rtol=0)


def test_D08_temperature_0_is_greedy_and_negative_values_are_refused():
    token, logprob = draw(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0.999]).double(), Sampling(temperature=0))
    assert token.item() == 1 and logprob.item() == pytest.approx(-0.407606, abs=1e-6)
    for wrong in (-0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            Sampling(temperature=wrong)


def test_the_uniform_numbers_of_a_sequence_are_its_own():
    assert uniforms((1, 2), 3, 4, 5).tolist() == uniforms((1, 2), 3, 4, 9)[:5].tolist()
    streams = [((1, 2), 3, 4), ((1, 2), 4, 3), ((2, 1), 3, 4), ((1,), 2, 3), ((1, 2, 3), 4, 0)]
    assert len({uniforms(*s, 1)[0] for s in streams}) == len(streams)


# ------------------------------------------------------------------------------------------------ work and memory
def test_only_live_sequences_are_computed_and_prompts_once_per_group(monkeypatch):
    sampler = engine(eos_ids=MANY_STOPS)
    passes = []
    run_layers = sampler.stage.run_layers

    def counting(hidden, positions, masks, cache):
        passes.append((type(cache).__name__, hidden.shape[0], hidden.shape[1]))
        return run_layers(hidden, positions, masks, cache)

    sampler.stage.run_layers = counting
    monkeypatch.setattr("sampler.PREFILL_TOKENS", 24)
    sampling = Sampling(temperature=1.5, max_new_tokens=24, max_sequences_in_flight=9)
    out = sampler.generate(PROMPTS, group_size=4, sampling=sampling, stream=(1, 2))
    prompts = [p for p in passes if p[0] == "_PromptCache"]
    steps = [p for p in passes if p[0] == "_TokenCache"]
    assert sum(rows for _, rows, _ in prompts) == len(PROMPTS)
    assert max(rows * tokens for _, rows, tokens in prompts) <= 24
    assert sum(rows for _, rows, _ in steps) == sum(len(c.ids) - 1 for c in out)
    assert max(rows for _, rows, _ in steps) <= 9
    assert len(steps) < sum(len(c.ids) for c in out) / 4, "slots that become free should be used again"


def test_caches_take_no_more_than_announced(monkeypatch):
    made = []
    lane = sampler._Lane
    monkeypatch.setattr("sampler._Lane", lambda capacity, store: made.append(store) or lane(capacity, store))
    sampling = Sampling(max_new_tokens=12, max_sequences_in_flight=10)
    s = engine()
    s.generate(PROMPTS, group_size=2, sampling=sampling, stream=(0,))
    # 4 layers, keys and values, 10 slots, 2 heads of size 8, 20 + 12 columns, 4 bytes
    assert sum(m.numel() * m.element_size() for m in made) == 4 * 2 * 10 * 2 * 8 * 32 * 4
    assert s.cache_bytes(20, sampling) == 4 * 2 * 10 * 2 * 8 * 32 * 4


# ------------------------------------------------------------------------------------------------ with the trainer
def test_a_changed_weight_reaches_the_sampler_and_training_goes_on_after_it():
    model = model_of()
    sampler = engine(model)
    arguments = dict(group_size=2, sampling=Sampling(temperature=0, max_new_tokens=8), stream=(0,))
    before = sampler.generate(PROMPTS, **arguments)
    rows = pack(before, choose_row_length(before, 1, True))
    sampler.stage(rows.input_ids, **rows.inputs())[..., 0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sampler.stage.parameters())
    tensors = {name: t.clone() for name, t in sampler.stage.export_tensors().items()}
    tensors["model.layers.3.mlp.down_proj.weight"] += 0.5
    sampler.update_weights(tensors, version=1)
    after = sampler.generate(PROMPTS, **arguments)
    assert sampler.version == 1
    assert all(max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) > 1e-3 for a, b in zip(before, after))


def test_logits_that_are_not_finite_are_named():
    sampler = engine(whole_model(small_config(), torch.float32))
    with torch.no_grad():
        sampler.stage.norm.weight[0] = float("nan")
    for temperature in (0, 1):
        with pytest.raises(FloatingPointError, match="not finite"):
            sampler.generate(PROMPTS, group_size=1, sampling=Sampling(temperature, max_new_tokens=2), stream=(0,))


def test_what_cannot_be_sampled_is_refused():
    def generate(prompts, group_size=2, **sampling):
        sampling = Sampling(**({"max_new_tokens": 8} | sampling))
        engine().generate(prompts, group_size=group_size, sampling=sampling, stream=(0,))

    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate([[5], []])
    with pytest.raises(ValueError, match="outside the model's vocabulary of 96"):
        generate([[5, 96]])
    with pytest.raises(ValueError, match="256 positions"):
        generate([[5] * 200], max_new_tokens=57)
    with pytest.raises(ValueError, match="group_size 0"):
        generate([[5]], group_size=0)
    with pytest.raises(ValueError, match="decode function"):
        generate([[5]], stop_strings=("x",))
    for wrong in (
        dict(max_new_tokens=0), dict(max_sequences_in_flight=0), dict(min_new_tokens=9, max_new_tokens=8),
        dict(top_p=0), dict(top_p=1.5), dict(stop_strings=("",)),
    ):
        with pytest.raises(ValueError):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="stage 1 of 2 cannot stand at place 0 of a chain of 1"):
        Sampler(stage_of(model_of(), 2, 1), eos_ids={EOS})
    assert plan_stages(model_of().config, 2)[1].is_last


def test_an_engine_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_engine.py").write_text(
        "class Good:\n    def generate(self): ...\n    def update_weights(self): ...\nclass Bad:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_engine("my_engine:Good").__name__ == "Good"
    for name, complaint in (
        ("rank1", "module:Class"), ("my_engine:Bad", r"no method generate\(\)"),
        ("my_engine:None_", "cannot be loaded"), ("no_such_module:Good", "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load_engine(name)
