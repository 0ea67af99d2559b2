"""The exported folder is a plain Hugging Face model: same logits, same tie, same dtype, same stops, same template."""

import json
import os

import pytest
import torch
from ranks import model_folder, run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from export import export_model
from split import plan_stages
from stages import Stage, load_config, load_weights


def trained_stage(mesh, model, folder, dtype=torch.float32):
    """This rank's stage with weights that differ from the folder's, exported; returns nothing."""
    config = load_config(model)
    stage = load_weights(Stage(config, plan_stages(config, mesh.stages)[mesh.stage], dtype=dtype), model)
    with torch.no_grad():
        for name, tensor in stage.export_tensors().items():
            tensor.mul_(1.5)
        if stage.holds_tied_copy:
            stage.lm_head.weight.mul_(1.5)
    export_model(stage, mesh, model, folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_E07_exported_folder_gives_the_trained_logits(tmp_path, world, tied):
    source = model_folder(tmp_path / "source", tied=tied)
    run_ranks(world, trained_stage, str(source), tmp_path / "out")
    want = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for p in want.parameters():
            p.mul_(1.5)
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(got(ids).logits, want(ids).logits)
    assert got.config.tie_word_embeddings is tied
    assert (got.lm_head.weight.data_ptr() == got.model.embed_tokens.weight.data_ptr()) is tied
    assert not (tmp_path / "out.partial").exists()


def test_F10_stops_and_template_are_those_of_the_source(tmp_path):
    source = model_folder(tmp_path / "source")
    GenerationConfig(eos_token_id=[1, 7], pad_token_id=0, temperature=0.7, do_sample=True).save_pretrained(source)
    run_ranks(2, trained_stage, str(source), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 7]
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    messages = [{"role": "user", "content": "What is 2 * 3?"}]
    ids = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
        for folder in (source, tmp_path / "out")
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_F12_every_tensor_has_the_type_the_config_names(tmp_path, dtype):
    source = model_folder(tmp_path / "source", dtype=dtype)
    run_ranks(2, trained_stage, str(source), tmp_path / "out")
    named = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert named == str(dtype).removeprefix("torch.")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_an_exported_folder_is_a_model_to_start_from(tmp_path):
    source = model_folder(tmp_path / "source")
    run_ranks(3, trained_stage, str(source), tmp_path / "out")

    def again(mesh):
        config = load_config(str(tmp_path / "out"))
        stage = load_weights(Stage(config, plan_stages(config, mesh.stages)[mesh.stage]), str(tmp_path / "out"))
        return stage.export_tensors()

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for part in run_ranks(2, again):
        assert part and all(torch.equal(tensor, whole[name]) for name, tensor in part.items())


def test_a_folder_of_the_same_name_is_replaced(tmp_path):
    source = model_folder(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "left over").write_text("from an earlier run")
    run_ranks(1, trained_stage, str(source), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists() and not (tmp_path / "out" / "left over").exists()


def test_E07_tied_copies_that_differ_are_not_exported(tmp_path):
    source = model_folder(tmp_path / "source")

    def drifted(mesh):
        config = load_config(str(source))
        stage = load_weights(Stage(config, plan_stages(config, mesh.stages)[mesh.stage]), str(source))
        if mesh.is_last:
            stage.lm_head.weight.data[0, 0] += 1
        with pytest.raises(RuntimeError, match="tied embeddings differ"):
            export_model(stage, mesh, str(source), tmp_path / "out")

    run_ranks(2, drifted)
    assert not (tmp_path / "out").exists()


def test_whoever_may_read_the_folder_may_read_every_file_in_it(tmp_path):
    source, umask = model_folder(tmp_path / "source"), os.umask(0o027)
    try:
        run_ranks(2, trained_stage, str(source), tmp_path / "out")
    finally:
        os.umask(umask)
    files = {f.name: f.stat().st_mode & 0o777 for f in (tmp_path / "out").iterdir() if f.suffix in (".safetensors", ".json")}
    assert len(files) >= 5 and set(files.values()) == {0o640}, files
