"""The built-in model: a tokenizer that loses nothing, honest noisy demonstrations, the same bits for the same seed."""

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_model
from rewards import grade, read_golds
from tasks import load_questions, render_prompts
from tiny_model import build_tokenizer, make_tiny_model, tiny_config, worked_solution


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", 3, steps=2)


def test_every_text_encodes_and_decodes_to_itself():
    tokenizer = build_tokenizer()
    for text in ("".join(map(chr, range(32, 127))) + "\n\t", "What is 34 * 7?", "Größe 東京 🙂"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
    assert len(tokenizer.encode("34", add_special_tokens=False)) == 2, "a token a digit"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_folder_is_a_hugging_face_model(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    assert 0.5e6 <= parameters <= 2e6 and model.config.model_type == "qwen2" and model.config.num_hidden_layers >= 4
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    built = build_tokenizer()
    messages = [{"role": "user", "content": "What is 34 * 7?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == built.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.count("What is 34 * 7?") == 1


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    same = load_file(make_tiny_model(tmp_path / "same", 3, steps=2) / "model.safetensors")
    other = load_file(make_tiny_model(tmp_path / "other", 4, steps=2) / "model.safetensors")
    assert weights.keys() == same.keys() and all(torch.equal(weights[n], same[n]) for n in weights)
    assert not torch.equal(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_made_model_is_kept_and_a_changed_recipe_makes_it_anew(folder):
    file = folder / "model.safetensors"
    before = file.stat().st_mtime_ns
    make_tiny_model(folder, 3, steps=2)
    assert file.stat().st_mtime_ns == before
    (folder / tiny_model.MARKER).unlink()  # as an interrupted make would leave it
    with pytest.raises(ValueError, match="name another folder"):
        make_tiny_model(folder, 3, steps=2)
    (folder / tiny_model.MARKER).write_text('{"recipe": "an older one"}')
    make_tiny_model(folder, 3, steps=2)
    assert file.stat().st_mtime_ns > before


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="name another folder"):
        make_tiny_model(tmp_path, 0, steps=1)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_worked_solutions_without_noise_are_all_right_and_gradable():
    questions = load_questions("task:multiplication")
    read_golds(questions)
    rng = random.Random(0)
    texts = [worked_solution(a, b, rng) for a in range(10, 100) for b in range(2, 10)]
    by_pair = {q.question: q for q in questions}
    graded = [(t, by_pair[f"What is {a} * {b}?"]) for t, (a, b) in zip(texts, ((a, b) for a in range(10, 100) for b in range(2, 10)))]
    assert grade(graded) == [1.0] * 720
    assert texts[24 * 8 + 5] == "4*7=28\n3*7=21\n1+2=3\n2+0=2\n238"


def test_noise_makes_about_half_of_the_solutions_wrong():
    rng, share = random.Random(0), tiny_model.WRONG_STEP
    right = sum(worked_solution(a, b, rng, share).endswith(f"\n{a * b}") for a in range(10, 100) for b in range(2, 10)) / 720
    assert abs(right - (1 - share) ** 4) < 0.06  # four steps, each right by itself


def test_demonstrations_come_from_the_training_split_and_teach_the_solution_alone():
    questions, tokenizer = load_questions(tiny_model.DEMONSTRATIONS), build_tokenizer()
    render_prompts(questions, tokenizer)
    held_out = {q.question for q in load_questions("task:multiplication?split=validation")}
    assert len(held_out) == 144 and not held_out & {q.question for q in questions}
    ids, labels = tiny_model.demonstration_batch(questions, tokenizer, random.Random(0), 8)
    for row, label in zip(ids, labels):
        taught = label != -100
        start = int(taught.nonzero()[0])
        assert tokenizer.decode(row[:start]).endswith("<|assistant|>") and torch.equal(row[taught], label[taught])
        assert label[taught][-1] == tokenizer.eos_token_id and (row[start:][~taught[start:]] == tokenizer.pad_token_id).all()


def test_config_fields_can_be_replaced():
    config = tiny_config(num_hidden_layers=2, tie_word_embeddings=False)
    assert (config.num_hidden_layers, config.tie_word_embeddings, config.hidden_size) == (2, False, 128)
