"""Runs a function on several processes joined by gloo, and small models for tests."""

import os
import pickle
import socket
import time
import traceback

import torch
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run(rank, world, port, function, arguments, queue):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    try:
        from parallel import open_mesh

        mesh = open_mesh("cpu", timeout_s=50)
        result = function(mesh, *arguments)
        mesh.barrier()
        queue.put((rank, True, pickle.dumps(result)))  # bytes: shared tensors would die with this process
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))


def run_ranks(world: int, function, *arguments, timeout: float = 60.0) -> list:
    """``function(mesh, *arguments)`` on ``world`` processes; the results by rank. A hang or an error fails the test."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=_run, args=(rank, world, port, function, arguments, queue), daemon=True)
        for rank in range(world)
    ]
    for p in processes:
        p.start()
    results = {}
    end = time.monotonic() + timeout
    try:
        while len(results) < world:
            if queue.empty():
                assert time.monotonic() < end, f"{world} processes did not finish within {timeout} s"
                time.sleep(0.01)
                continue
            rank, fine, result = queue.get()
            assert fine, f"rank {rank} of {world} failed:\n{result}"
            results[rank] = pickle.loads(result)
    finally:
        for p in processes:
            p.join(2)
            if p.is_alive():
                p.kill()
    return [results[rank] for rank in range(world)]


def small_config(kind: str = "qwen2", *, layers: int = 4, tied: bool = True, vocabulary: int = 96, **more):
    """A configuration of the given architecture with hidden size 32."""
    import transformers

    classes = {
        "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig, "smollm3": transformers.SmolLM3Config,
    }
    common = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocabulary, max_position_embeddings=256, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )
    if kind == "qwen3":
        common["head_dim"] = 8
    return classes[kind](**(common | more))


def whole_model(config, dtype=torch.float64, seed: int = 0):
    """transformers' own model with random weights, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype))
    return model


def stage_of(model, count: int = 1, index: int = 0, split=None, **more):
    """Stage ``index`` of ``count`` with the weights of transformers' ``model``."""
    from stages import Stage, plan_stages

    spec = plan_stages(model.config, count, split)[index]
    stage = Stage(model.config, spec, dtype=model.dtype, **more)
    stage.load_tensors(model.state_dict())
    return stage


def random_rollout(questions: int, group_size: int, vocabulary: int = 96, seed: int = 0, longest: int = 12):
    """Made-up completions with prompts of 3 to 8 tokens; log-probs, advantages and weights are filled in."""
    from rollout import Completion

    g = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))  # noqa: E731
    ids = lambda n: torch.randint(3, vocabulary, (n,), generator=g).tolist()  # noqa: E731
    out = []
    for q in range(questions):
        prompt = ids(number(3, 8))
        for s in range(group_size):
            n = number(1, longest)
            c = Completion(q, s, prompt, ids(n), torch.randn(n, generator=g).sub(4).tolist(), finished=True)
            c.advantage = float(torch.randn(1, generator=g))
            out.append(c)
    total = sum(len(c.ids) for c in out)
    for c in out:
        c.weight = 1 / total
    return out


def model_folder(path, kind: str = "qwen2", *, dtype=torch.float32, seed: int = 0, **more):
    """A Hugging Face folder with a random model of ``small_config`` and the built-in tokenizer and chat template."""
    from transformers import GenerationConfig

    from tiny_model import build_tokenizer

    tokenizer = build_tokenizer()
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    model = whole_model(small_config(kind, **(dict(vocabulary=len(tokenizer)) | ids | more)), dtype, seed)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
