"""Cutting a model: the plan, the masks, loading only what is needed, and the same numbers as the uncut model."""

import json
import re

import pytest
import safetensors
import safetensors.torch
import torch
import transformers

import plain
from attention import attention_mask
from ranks import random_rollout, small_config, stage_of, whole_model
from rollout import pack
from split import SUPPORTED, attention_cost, describe_plan, plan_stages
from stages import EMBEDDING, HEAD, Stage, load_config, load_weights

QWEN_05B = transformers.Qwen2Config(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)
WINDOWS = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)


def sizes(specs):
    return [s.end_layer - s.first_layer for s in specs]


def chain(stages, rows):
    """All stages one after the other, without any process group."""
    x = rows.input_ids
    for stage in stages:
        x = stage(x, **rows.inputs())
    return x


def cut(model, count, **more):
    return [stage_of(model, count, i, **more) for i in range(count)]


def loaded(folder, count, dtype=torch.float64, **more):
    config = load_config(str(folder))
    return [load_weights(Stage(config, s, dtype=dtype, **more), str(folder)) for s in plan_stages(config, count)]


def some_rows(dtype=torch.float64, row_length=48):
    return pack(random_rollout(4, 3, seed=2), row_length, dtype=dtype)


# ------------------------------------------------------------------------------------------------ the plan
@pytest.mark.parametrize("layers, count, want", [
    (5, 2, [3, 2]), (30, 4, [8, 8, 7, 7]), (4, 4, [1, 1, 1, 1]), (7, 3, [3, 2, 2]), (6, 1, [6]), (24, 2, [12, 12]),
])
def test_E01_layers_that_do_not_divide_are_never_dropped(layers, count, want):
    specs = plan_stages(small_config(layers=layers, vocabulary=96), count)
    assert sizes(specs) == want
    assert [layer for s in specs for layer in range(s.first_layer, s.end_layer)] == list(range(layers))
    assert [(s.index, s.count, s.is_first, s.is_last) for s in specs] == [
        (i, count, i == 0, i == count - 1) for i in range(count)
    ]


@pytest.mark.parametrize("layers, count", [(5, 2), (30, 4)])
@pytest.mark.parametrize("kind", ("qwen2", "qwen3", "llama", "smollm3"))
def test_E01_log_probs_are_those_of_one_process(kind, layers, count):
    if kind != "qwen2" and layers == 30:
        layers, count = 6, 4
    model = whole_model(small_config(kind, layers=layers))
    rows = some_rows()
    stages = cut(model, count)
    names = [name for s in stages for name in s.export_tensors()]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())  # each exactly once
    with torch.no_grad():
        want, entropy = plain.packed_logprobs(model, rows)
        out = chain(stages, rows)
    assert plain.difference(out[..., 0], want) < 1e-10
    assert plain.difference(out[..., 1], entropy) < 1e-10


def test_a_large_vocabulary_takes_layers_off_the_last_stage():
    specs = plan_stages(QWEN_05B, 2)
    assert sizes(specs) == [18, 6]  # the head has the parameters of 9.129 layers, and is computed four times instead of three
    assert [s.cost for s in specs] == pytest.approx([18 / 36.172, 18.172 / 36.172], abs=1e-4)
    head, layer = 151936 * 896, 14_912_384
    assert specs[0].parameters == 18 * layer + head
    assert specs[1].parameters == 6 * layer + head + 896
    short = plan_stages(QWEN_05B, 2, head_share=0.25)  # answers of a quarter of the tokens: the head weighs 3.043 layers
    assert sizes(short) == [14, 10] and [s.cost for s in short] == pytest.approx([14 / 27.043, 13.043 / 27.043], abs=1e-4)
    again = plan_stages(QWEN_05B, 2, activation_checkpointing=True)  # then the layers are computed four times too
    assert sizes(again) == [17, 7] and [s.cost for s in again] == pytest.approx([17 / 33.129, 16.129 / 33.129], abs=1e-4)
    assert plan_stages(QWEN_05B, 1)[0].parameters == 24 * layer + head + 896  # the tied head is there only once
    assert sizes(plan_stages(QWEN_05B, 4)) == [8, 8, 7, 1]  # the head alone is heavier than any other stage


@pytest.mark.parametrize("vocabulary", (50, 500, 2000, 5000))
def test_no_other_split_has_a_cheaper_slowest_stage(vocabulary):
    config = small_config(layers=9, vocabulary=vocabulary)
    layer = sum(p.numel() for p in stage_of_shape(config).layers[0].parameters())

    head = vocabulary * 32 * 4 / 3

    def slowest(split):
        return max(n * layer + (head if i == len(split) - 1 else 0) for i, n in enumerate(split))

    def splits(count, layers):
        if count == 1:
            return [[layers]]
        return [[n, *rest] for n in range(1, layers - count + 2) for rest in splits(count - 1, layers - n)]

    for count in (2, 3, 4):
        specs = plan_stages(config, count)
        assert slowest(sizes(specs)) == min(map(slowest, splits(count, 9)))
        assert sum(s.cost for s in specs) == pytest.approx(1)
        assert max(s.cost for s in specs) == pytest.approx(slowest(sizes(specs)) / (9 * layer + head))


def stage_of_shape(config, count=1, index=0, **more):
    return Stage(config, plan_stages(config, count)[index], **more)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("tied", (True, False))
def test_a_stage_allocates_its_own_parameters_and_no_more(kind, tied):
    config = small_config(kind, layers=5, tied=tied)
    for count in (1, 2, 3):
        whole = set()
        for spec in plan_stages(config, count):
            stage = Stage(config, spec)
            assert len(stage.layers) == spec.end_layer - spec.first_layer
            assert (stage.embed_tokens is not None) == spec.is_first
            assert (stage.lm_head is not None) == (stage.norm is not None) == spec.is_last
            assert sum(p.numel() for p in stage.parameters()) == spec.parameters
            assert all(p.device.type == "cpu" for p in stage.parameters())
            assert stage.holds_tied_copy == (tied and spec.is_last and count > 1)
            whole |= set(stage.export_tensors())
        assert whole == {n for n, _ in whole_model(config).named_parameters()}


def test_a_split_given_by_hand():
    config = small_config(layers=5)
    assert sizes(plan_stages(config, 3, [1, 3, 1])) == [1, 3, 1]
    model = whole_model(config)
    stages = [stage_of(model, 3, i, split=[1, 3, 1]) for i in range(3)]
    rows = some_rows()
    with torch.no_grad():
        assert plain.difference(chain(stages, rows)[..., 0], plain.packed_logprobs(model, rows)[0]) < 1e-10


@pytest.mark.parametrize("split", ([3, 3], [5], [2, 2, 1], [5, 0], [6, -1], [0, 0]))
def test_a_split_that_does_not_fit_is_refused_with_the_numbers(split):
    with pytest.raises(ValueError) as refused:
        plan_stages(small_config(layers=5), 2, split)
    message = str(refused.value)
    assert ",".join(map(str, split)) in message and "2 stages" in message and "5 layers" in message


@pytest.mark.parametrize("count", (5, 9, 0))
def test_fewer_layers_than_stages_is_refused_with_the_numbers(count):
    with pytest.raises(ValueError, match=rf"4 layers cannot fill {count} stages.*at most 4"):
        plan_stages(small_config(layers=4), count)


@pytest.mark.parametrize("config", (
    transformers.GPT2Config(n_layer=4), transformers.Gemma2Config(num_hidden_layers=4),
    transformers.MixtralConfig(num_hidden_layers=4), transformers.Qwen2MoeConfig(num_hidden_layers=4),
), ids=lambda c: c.model_type)
def test_other_architectures_are_refused_by_name(config, tmp_path):
    config.save_pretrained(tmp_path)
    for call in (lambda: plan_stages(config, 2), lambda: load_config(str(tmp_path))):
        with pytest.raises(ValueError, match=f"{config.model_type}.*qwen2, qwen3, llama, mistral, smollm3"):
            call()


def test_the_plan_is_shown_with_all_its_numbers():
    text = describe_plan(plan_stages(QWEN_05B, 2), QWEN_05B)
    lines = text.splitlines()
    assert len(lines) == 4
    assert re.split(r"\s{2,}", lines[1]) == ["0", "0-17", "404.56 M", "50%", "6.03 GiB"]
    assert re.split(r"\s{2,}", lines[2]) == ["1", "18-23", "225.61 M", "50%", "3.36 GiB"]
    assert "151936 x 896" in lines[3] and "tied" in lines[3]
    untied = small_config(tied=False)
    assert "tied" not in describe_plan(plan_stages(untied, 2), untied)


def test_attention_cost_of_a_column():
    """A column costs 2 heads * head_dim products (scores and values): 1792 of the 14.9 M of a layer."""
    assert attention_cost(QWEN_05B) == pytest.approx(2 * 896 / 14_912_384)
    assert attention_cost(small_config("qwen3")) > 0


# ------------------------------------------------------------------------------------------------ the same numbers
MODELS = {
    "qwen2": {}, "qwen3": {}, "llama": {}, "smollm3": {}, "mistral": dict(tied=False, sliding_window=5),
    "qwen2-windows": WINDOWS, "qwen3-windows": WINDOWS,
    "smollm3-windows": dict(use_sliding_window=True, sliding_window=5),
    "llama-biases": dict(attention_bias=True, mlp_bias=True), "qwen3-head_dim": dict(head_dim=16),
    "llama3-rope": dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )),
    "mistral-no-window": dict(tied=False, sliding_window=None),
}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_plain_sequences_through_transformers(name):
    """No packing, no mask, no stages on the other side: G sequences, each on its own."""
    kind = name.split("-")[0].replace("llama3", "llama")
    model = whole_model(small_config(kind, **MODELS[name]))
    completions = random_rollout(4, 3, seed=2)
    with torch.no_grad():
        want = [plain.sequence_logprobs(model, c) for c in completions]
        for share, count in ((True, 1), (True, 3), (False, 2)):
            rows = pack(completions, 48, share_prompts=share, dtype=torch.float64)
            got = plain.by_completion(rows, chain(cut(model, count), rows)[..., 0], len(completions))
            assert all(plain.difference(*pair) < 1e-6 for pair in zip(got, want))


@pytest.mark.parametrize("temperature", (0.7, 1.0, 2.5))
def test_log_probs_and_entropy_at_the_sampling_temperature(temperature):
    model, rows = whole_model(small_config("llama")), some_rows()
    with torch.no_grad():
        logprob, entropy = plain.packed_logprobs(model, rows, temperature)
        for count in (1, 2):
            out = chain(cut(model, count, temperature=temperature), rows)
            assert plain.difference(out[..., 0], logprob) < 1e-10
            assert plain.difference(out[..., 1], entropy) < 1e-10
    if temperature != 1:
        assert plain.difference(logprob, plain.packed_logprobs(model, rows)[0].detach()) > 1e-3


def test_values_stand_at_completion_tokens_only():
    rows = some_rows()
    out = chain(cut(whole_model(small_config()), 2), rows)
    assert not out[rows.segment_ids <= 0].any()
    assert (out[rows.segment_ids > 0] != 0).all()


def test_C20_log_probs_do_not_depend_on_what_stands_beside_in_float32():
    """Alone in a row without padding; between others; in a much longer row; whatever token pads."""
    model = whole_model(small_config("qwen3"), torch.float32)
    stage, completions = stage_of(model), random_rollout(4, 3, seed=2)
    packed = {pad: pack(completions, 64, pad_id=pad) for pad in (0, 2, 50)}
    outputs = {pad: stage(rows.input_ids, **rows.inputs()) for pad, rows in packed.items()}
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[0], outputs[50])
    together = plain.by_completion(packed[0], outputs[0][..., 0], len(completions))
    for i, c in enumerate(completions):
        for row_length in (len(c), len(c) + 9):
            row = pack([c], row_length)
            alone = stage(row.input_ids, **row.inputs())[row.sequence >= 0][:, 0]
            assert (alone - together[i]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ("qwen2", "qwen3", "llama", "mistral", "smollm3"))
def test_C22_T42_dropout_is_off_in_every_pass(kind):
    """Also where the model's own configuration asks for it, and where somebody puts the stage into training mode."""
    calm = whole_model(small_config(kind), torch.float32)
    config = small_config(kind, attention_dropout=0.1)
    rows = some_rows(torch.float32)
    stage = Stage(config, plan_stages(config, 1)[0])
    stage.load_tensors(calm.state_dict())
    assert not any(m.training for m in stage.modules())
    with torch.no_grad():
        scored = stage(rows.input_ids, **rows.inputs())
        assert torch.equal(scored, stage_of(calm)(rows.input_ids, **rows.inputs()))
    trained = stage(rows.input_ids, **rows.inputs())
    assert torch.equal((trained - scored)[..., 0].exp(), torch.ones(rows.shape))  # the ratio, exactly
    stage.train()
    assert torch.equal(stage(rows.input_ids, **rows.inputs()), scored)


def gradients_of(stages, rows):
    for stage in stages:
        stage.zero_grad()
    (chain(stages, rows)[..., 0] * rows.advantage.to(torch.float32)).sum().backward()
    return [p.grad for stage in stages for p in stage.parameters()]


@pytest.mark.parametrize("kind", ("qwen2", "qwen3", "llama", "mistral", "smollm3"))
def test_activation_checkpointing_gives_the_same_gradients_exactly(kind):
    model, rows = whole_model(small_config(kind)), some_rows()
    plainly = gradients_of(cut(model, 2), rows)
    saving = gradients_of(cut(model, 2, activation_checkpointing=True), rows)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(plainly, saving))


def test_activation_checkpointing_keeps_fewer_activations():
    model, rows = whole_model(small_config(layers=6)), some_rows()
    kept = {}
    for on in (False, True):
        total = 0

        def note(tensor):
            nonlocal total
            total += tensor.numel()
            return tensor

        stage = stage_of(model, activation_checkpointing=on)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            stage(rows.input_ids, **rows.inputs())
        kept[on] = total
    assert kept[True] < 0.4 * kept[False]


def test_head_chunks_change_nothing():
    model, rows = whole_model(small_config()), some_rows()
    whole, chunked = gradients_of(cut(model, 2), rows), gradients_of(cut(model, 2, head_chunk=7), rows)
    assert (rows.segment_ids > 0).sum() > 3 * 7
    assert all(plain.difference(a, b) < 1e-6 for a, b in zip(chunked, whole))
    outputs = [chain(cut(model, 2, head_chunk=n), rows).detach() for n in (7, 1000)]
    assert plain.difference(*outputs) < 1e-12


@pytest.mark.parametrize("checkpointing", (False, True))
def test_bfloat16_products_under_float32_parameters_are_close(checkpointing):
    model = whole_model(small_config("qwen3"), torch.float32)
    rows = some_rows(torch.float32)
    exact = cut(model, 2)
    mixed = cut(model, 2, compute_dtype=torch.bfloat16, activation_checkpointing=checkpointing)
    want, got = gradients_of(exact, rows), gradients_of(mixed, rows)
    assert all(p.dtype == torch.float32 for s in mixed for p in s.parameters())
    assert all(g.dtype == torch.float32 for g in got)
    assert mixed[0](rows.input_ids, **rows.inputs()).dtype == torch.float32  # what travels between stages
    cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), 0).item() for a, b in zip(got, want)]
    assert min(cosines) > 0.98
    a, b = (chain(s, rows).detach() for s in (mixed, exact))
    assert a.dtype == torch.float32
    assert 1e-6 < (a - b).abs().max() < 0.05  # bfloat16 was really used, and is close


def test_parameters_in_bfloat16_give_float32_log_probs():
    model = whole_model(small_config(), torch.float32)
    rows = some_rows(torch.float32)
    half = Stage(model.config, plan_stages(model.config, 1)[0], dtype=torch.bfloat16)
    half.load_tensors(model.state_dict())
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    out, want = half(rows.input_ids, **rows.inputs()), stage_of(model)(rows.input_ids, **rows.inputs())
    assert out.dtype == torch.float32
    assert (out - want).abs().max() < 0.1


# ------------------------------------------------------------------------------------------------ folders
@pytest.fixture(params=("one file", "shards"))
def folder(request, tmp_path):
    """Makes a folder of a model: call it with the model."""

    def make(model):
        model.save_pretrained(tmp_path, max_shard_size="20KB" if request.param == "shards" else "1GB")
        count = len(list(tmp_path.glob("*.safetensors")))
        assert count >= 4 if request.param == "shards" else count == 1
        return tmp_path

    return make


@pytest.fixture
def tensors_read(monkeypatch):
    """The names of all tensors read from files, and the files opened."""
    names, files, real = [], [], safetensors.safe_open

    class Counting:
        def __init__(self, path, *arguments):
            files.append(str(path))
            self.file = real(path, *arguments)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            names.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Counting)
    return names, files


@pytest.mark.parametrize("kind, tied", [
    ("qwen2", True), ("qwen3", False), ("llama", True), ("mistral", False), ("smollm3", True),
])
def test_only_the_stages_own_tensors_are_read(folder, tensors_read, kind, tied):
    model = whole_model(small_config(kind, layers=5, tied=tied))
    path, (names, files) = folder(model), tensors_read
    config, parameters, rows = load_config(str(path)), dict(model.named_parameters()), some_rows()
    everything, stages = [], []
    for spec in plan_stages(config, 3):
        names.clear(), files.clear()
        stage = load_weights(Stage(config, spec, dtype=torch.float64), str(path))
        stages.append(stage)
        assert sorted(names) == sorted(stage.export_names().values())
        assert len(set(names)) == len(names)
        own = {name for name in parameters for layer in re.findall(r"layers\.(\d+)", name)
               if spec.first_layer <= int(layer) < spec.end_layer}
        own |= {EMBEDDING} if spec.is_first or (tied and spec.is_last) else set()
        own |= ({"model.norm.weight"} | ({HEAD} if not tied else set())) if spec.is_last else set()
        assert set(names) == own
        assert len(set(files)) == len(files)
        if (path / "model.safetensors.index.json").exists():
            assert len(files) < len(list(path.glob("*.safetensors")))  # nor is a file opened for nothing
        everything += names
        for name, tensor in stage.export_tensors().items():
            assert torch.equal(tensor, parameters[name].detach())
    assert set(everything) == set(parameters)
    assert sorted(everything) == sorted([*parameters, *([EMBEDDING] if tied else [])])
    with torch.no_grad():
        assert plain.difference(chain(stages, rows)[..., 0], plain.packed_logprobs(model, rows)[0]) < 1e-10


def test_E07_a_tied_checkpoint_without_a_stored_head_on_two_stages(folder):
    model = whole_model(small_config("qwen2", tied=True))
    path = folder(model)
    stored = {name for file in path.glob("*.safetensors") for name in safetensors.torch.load_file(file)}
    assert HEAD not in stored and EMBEDDING in stored
    first, last = loaded(path, 2)
    assert torch.equal(last.lm_head.weight, first.embed_tokens.weight)
    assert torch.equal(last.lm_head.weight, model.lm_head.weight)
    assert last.export_names()[HEAD] == EMBEDDING and EMBEDDING not in last.export_tensors()
    rows = some_rows()
    with torch.no_grad():
        hidden = first(rows.input_ids, **rows.inputs())
        masks = {"full_attention": attention_mask(rows.position_ids, rows.segment_ids, rows.group_ids, torch.float64)}
        logits = last.logits(last.run_layers(hidden, rows.position_ids, masks))
        want = torch.cat([
            model(
                input_ids=rows.input_ids[m : m + 1], attention_mask=plain.who_sees_whom(rows, m),
                position_ids=rows.position_ids[m : m + 1],
            ).logits
            for m in range(rows.shape[0])
        ])
    assert logits.dtype == torch.float64
    assert plain.difference(logits, want) < 1e-10


def test_one_stage_of_a_tied_model_holds_one_tensor(folder):
    path = folder(whole_model(small_config("qwen2", tied=True)))
    (stage,) = loaded(path, 1)
    assert stage.lm_head.weight is stage.embed_tokens.weight
    assert list(stage.export_tensors()).count(EMBEDDING) == 1 and HEAD not in stage.export_tensors()


def test_weights_are_converted_to_the_stages_type(folder):
    model = whole_model(small_config("llama"), torch.bfloat16)
    path = folder(model)
    for stage in loaded(path, 2, dtype=torch.float32):
        for name, tensor in stage.export_tensors().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, dict(model.named_parameters())[name].detach().float())


def rewrite(path, change):
    """Apply ``change`` to the tensors of a folder of one file."""
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name, index", [
    ("model.layers.3.mlp.up_proj.weight", 1), (EMBEDDING, 0), ("lm_head.weight", 1), ("model.norm.weight", 1),
])
def test_a_missing_tensor_is_named_with_its_stage(tmp_path, name, index):
    whole_model(small_config("llama", tied=False)).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    config = load_config(str(tmp_path))
    specs = plan_stages(config, 2)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*stage {index}"):
        load_weights(Stage(config, specs[index]), str(tmp_path))
    load_weights(Stage(config, specs[1 - index]), str(tmp_path))  # the other stage misses nothing


@pytest.mark.parametrize("name, wrong, right", [
    ("model.layers.2.self_attn.q_proj.weight", [32, 48], [32, 32]), (EMBEDDING, [90, 32], [96, 32]),
    ("model.norm.weight", [48], [32]), ("model.layers.0.mlp.down_proj.weight", [1], [32, 48]),
])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path, name, wrong, right):
    """[1] would broadcast without a word."""
    whole_model(small_config("llama", tied=True)).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(wrong)}))
    config = load_config(str(tmp_path))
    with pytest.raises(ValueError) as refused:
        load_weights(stage_of_shape(config), str(tmp_path))
    assert name in str(refused.value) and str(wrong) in str(refused.value) and str(right) in str(refused.value)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        load_config(str(tmp_path))
    config = small_config()
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors"):
        load_weights(stage_of_shape(config), str(tmp_path))
    assert load_config(str(tmp_path)).num_hidden_layers == 4


def test_a_shard_that_is_gone_is_named(tmp_path):
    whole_model(small_config()).save_pretrained(tmp_path, max_shard_size="20KB")
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    gone = where["model.norm.weight"]
    (tmp_path / gone).unlink()
    with pytest.raises(ValueError, match=gone):
        load_weights(stage_of_shape(load_config(str(tmp_path)), 2, 1), str(tmp_path))


def test_a_mistyped_folder_is_refused_by_name(tmp_path):
    missing = str(tmp_path / "no" / "such" / "folder")
    with pytest.raises(ValueError, match=re.escape(missing)):
        load_config(missing)


def test_export_names_go_back_and_forth(tmp_path):
    """What the stages export, put together, is a state dict that transformers loads without a missing key."""
    model = whole_model(small_config("qwen3", layers=5, tied=False))
    other = whole_model(small_config("qwen3", layers=5, tied=False), seed=9)
    exported = {}
    for stage in cut(model, 3):
        assert not set(exported) & set(stage.export_tensors())
        exported |= stage.export_tensors()
    other.load_state_dict(exported, strict=True)
    rows = some_rows()
    with torch.no_grad():
        assert torch.equal(plain.packed_logprobs(other, rows)[0], plain.packed_logprobs(model, rows)[0])
