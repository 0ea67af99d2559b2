"""Runs a function on several processes joined by gloo, and small models for tests."""

import os
import pickle
import socket
import sys
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
    from split import plan_stages
    from stages import Stage

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


class Ranks:
    """train_grpo.py on ``world`` forked processes, as torchrun would start them but without torchrun: their processes can be
    signalled one by one, and no interpreter has to start. What rank r prints is in ``output(r)``.

    Args:
        fault: called in the forked process before it starts, with its rank; it may patch modules.
    """

    def __init__(self, world: int, argv: list[str], folder, *, fault=None, **environment):
        context, port = mp.get_context("fork"), free_port()
        self.logs = [folder / f"output-{os.urandom(4).hex()}-{rank}.txt" for rank in range(world)]
        self.processes = [
            context.Process(target=_run_training, args=(rank, world, port, argv, self.logs[rank], fault, environment))
            for rank in range(world)
        ]
        for p in self.processes:
            p.start()

    def output(self, rank: int = 0) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def wait_for(self, condition, timeout: float = 60.0) -> None:
        """Until ``condition()``; fails when all processes have ended without it."""
        end = time.monotonic() + timeout
        while not condition():
            alive = any(p.is_alive() for p in self.processes)
            assert alive or condition(), "the processes have ended:\n" + self.output(0)[-3000:]
            assert time.monotonic() < end, f"nothing after {timeout} s:\n" + self.output(0)[-3000:]
            time.sleep(0.005)

    def running(self) -> bool:
        return any(p.is_alive() for p in self.processes)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end_waiting_starts(self, grace: float = 5.0) -> None:
        """What torchrun does: a process that dies before all have met leaves the others waiting for it; they get a SIGTERM."""
        end = time.monotonic() + grace
        while self.running() and time.monotonic() < end:
            time.sleep(0.01)
        for p in self.processes:
            if p.is_alive():
                p.terminate()

    def codes(self, timeout: float = 60.0) -> list[int]:
        """The exit codes, when all have ended; what has not after ``timeout`` seconds is killed and fails the test."""
        end = time.monotonic() + timeout
        for p in self.processes:
            p.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, p in enumerate(self.processes) if p.is_alive()]
        for p in self.processes:
            if p.is_alive():
                p.kill()
                p.join()
        assert not late, f"ranks {late} did not end within {timeout} s:\n" + self.output(late[0])[-3000:]
        return [p.exitcode for p in self.processes]


def _run_training(rank, world, port, argv, log, fault, environment):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment,
    }
    if fault is not None:
        fault(rank)
    import train_grpo

    train_grpo.main(argv)


def train_ranks(world: int, argv: list[str], folder, *, code: int = 0, **more) -> "Ranks":
    """Start, wait, and check that every process ended with ``code``."""
    ranks = Ranks(world, argv, folder, **more)
    codes = ranks.codes()
    assert codes == [code] * world, f"exit codes {codes}:\n" + "\n".join(ranks.output(r)[-3000:] for r in range(world))
    return ranks


def training_folder(path, rows: int = 40, **more):
    """A model folder with a file of questions beside it, and the flags of a quick run on it."""
    import json

    folder = model_folder(path, **more)
    (folder / "questions.jsonl").write_text("\n".join(json.dumps({"question": f"Say {i}.", "answer": i}) for i in range(rows)))
    return folder


def early_letter(completion: str, row: dict) -> float:
    """A random model is never right, but it can learn to begin with a low code point."""
    return float(completion[:1] < "]")


def quick_flags(model, project_dir, *more) -> list[str]:
    flags = (
        f"--model {model} --project_dir {project_dir} --data {model}/questions.jsonl --batch_size 4 --group_size 4 "
        "--max_completion_tokens 12 --eval_questions 8 --learning_rate 1e-2 --tracker none --verify_type ranks:early_letter"
    )
    return [*flags.split(), *map(str, more)]
