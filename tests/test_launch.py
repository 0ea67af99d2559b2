"""The scripts of launch/: under faked SLURM variables with a stub srun that really starts two local "nodes", several agents
on one machine, two runs at once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from ranks import free_port, quick_flags, train_ranks, training_folder
from test_checkpoint import assert_same_end, metrics

from checkpoint import is_complete
from config import parse_settings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")])

SRUN = """#!{python}
import os, signal, subprocess, sys, time
place = next(i for i, a in enumerate(sys.argv) if i and not a.startswith("--"))
options, command = dict(a[2:].split("=", 1) for a in sys.argv[1:place]), sys.argv[place:]
tasks = int(options["ntasks"])
assert options["kill-on-bad-exit"] == "1" and options["ntasks-per-node"] == "1"
nodes = [
    subprocess.Popen(
        command, stdout=open(options["output"].replace("%n", str(n)), "w"), stderr=subprocess.STDOUT,
        env=os.environ | {{"SLURM_NODEID": str(n), "SLURM_STEP_NUM_TASKS": str(tasks)}},
    )
    for n in range(tasks)
]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: [node.send_signal(number) for node in nodes])
while all(node.poll() is None for node in nodes):
    time.sleep(0.05)
if any(node.poll() for node in nodes):  # slurm gives the others a moment between its SIGTERM and its SIGKILL
    time.sleep(2)
    [node.kill() for node in nodes if node.poll() is None]
sys.exit(max(abs(node.wait()) for node in nodes))
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then printf 'localhost\\nlocalhost\\n'; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return training_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def node(tmp_path):
    """An environment with stub commands, faked SLURM variables, this interpreter as the environment, and a settings file."""
    folder = tmp_path / "stubs"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/activate").write_text(f'export PATH="{folder}/bin:{Path(sys.executable).parent}:$PATH"\n')
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin/torchrun").write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    (folder / "bin/torchrun").chmod(0o755)
    (folder / "settings.yaml").write_text("tracker: none\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "RANK", "WORLD", "LOCAL", "MASTER", "PET_", "SLURM"))}
    return env | {
        "PATH": f"{folder}/bin:{os.environ['PATH']}", "VENV": str(folder), "CONFIG": str(folder / "settings.yaml"),
        "PYTHONPATH": f"{ROOT}/tests", "SCONTROL_LOG": str(tmp_path / "scontrol.txt"), "OMP_NUM_THREADS": "1",
    }


def slurm(node, tmp_path, nodes: int, gpus: int, attempt: int = 0) -> dict:
    """The variables of a batch script; submitted from a copy of the repository's files, where the logs go."""
    if not (tmp_path / "submit").exists():
        (tmp_path / "submit").mkdir()
        for path in [*ROOT.glob("*.py"), ROOT / "launch", ROOT / "tests"]:
            (tmp_path / "submit" / path.name).symlink_to(path)
    return node | {
        "SLURM_JOB_ID": str(free_port() + 7), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NTASKS": str(nodes), "SLURM_JOB_NAME": "grpo",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": str(gpus), "SLURM_SUBMIT_DIR": str(tmp_path / "submit"),
        "SLURM_RESTART_COUNT": str(attempt),
    }


def said(command, env, **more) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, **more)


# ------------------------------------------------------------------------------------------------ the scripts as text
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script):
    done = said(["bash", "-n", str(script)], os.environ)
    assert done.returncode == 0 and not done.stderr
    if shutil.which("shellcheck"):
        checked = said(["shellcheck", "-x", "-S", "warning", str(script)], os.environ)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", ["slurm_single_node", "slurm_multi_node"])
def test_E16_batch_scripts_ask_for_one_task_per_node_and_a_signal_before_the_limit(script):
    asked = set(re.findall(r"^#SBATCH (\S+)", (ROOT / f"launch/{script}.sbatch").read_text(), re.M))
    assert {"--ntasks-per-node=1", "--signal=B:USR1@120", "--requeue", "--open-mode=append"} <= asked


def test_E15_dry_run_prints_the_final_command_with_the_jobs_own_port(node, tmp_path):
    env = slurm(node, tmp_path, 2, 4) | {"SLURM_JOB_ID": "123456"}
    done = said(["bash", "launch/slurm_multi_node.sbatch", "--dry-run", "Qwen/Qwen2.5-7B", "--prompt_template", "{question} now"], env)
    step, command = done.stdout.splitlines()
    assert step.startswith("srun --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 ") and "attempt0-node%n.out" in step
    assert "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:13456 --rdzv_id=123456-0 --nproc_per_node=4 train_grpo.py" in command
    assert command.endswith(r"--model Qwen/Qwen2.5-7B --prompt_template \{question\}\ now ")
    ports = set()
    for job in range(0, 100_000, 997):
        done_port = 10000 + job % 20000
        ports.add(done_port)
        assert 1024 < done_port < 32768, "below the range of outgoing connections"
    assert len(ports) > 90
    single = said(["bash", "launch/slurm_single_node.sbatch", "--dry-run", "m"], node)  # on a login node, without variables
    assert "torchrun --standalone --nproc_per_node=1 train_grpo.py" in single.stdout and single.returncode == 0


@pytest.mark.parametrize(
    "script, arguments, more, sentence",
    [
        ("slurm_multi_node.sbatch", [], {}, "usage: sbatch launch/slurm_multi_node.sbatch"),
        ("slurm_single_node.sbatch", ["m"], {"SLURM_NTASKS": "8"}, "8 tasks on 1 nodes: ask for --ntasks-per-node=1"),
        ("multi_node.sh", ["m"], {}, "usage: NODES=2 HEAD=node1"),
        ("multi_node.sh", ["m"], {"NODES": "2", "HEAD": "a", "SLURM_STEP_NUM_TASKS": "16"}, "16 tasks run on 2 nodes"),
        ("single_node.sh", [], {}, "usage:"),
        ("single_node.sh", ["m"], {"GPUS": "0"}, "no GPU found"),
    ],
)
def test_E16_scripts_refuse_in_one_sentence(node, script, arguments, more, sentence):
    done = said(["bash", f"launch/{script}", *arguments], node | more)
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------ for real
def until(condition, process, log: Path, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


def test_E17_E18_a_job_on_two_nodes_saves_at_its_limit_is_requeued_and_ends_as_one_agent_would(node, model, tmp_path):
    """Four stages over two agents with two processes each; USR1 to the batch script, as SLURM sends it."""
    folder, flags = tmp_path / "run", ("--epochs", 2, "--max_steps", 12, "--save_every", 0, "--eval_every", 6, "--chunk_size", 1)
    argv = ["bash", "launch/slurm_multi_node.sbatch", str(model), *quick_flags(model, folder, *flags)]
    env = slurm(node, tmp_path, 2, 2)
    log = tmp_path / "batch.txt"
    first = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)
    until(lambda: (folder / "metrics.jsonl").exists() and len(metrics(folder)) > 1, first, log)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(40) != 0
    submit, job = tmp_path / "submit", env["SLURM_JOB_ID"]
    output = "".join((submit / f"slurm-grpo-{job}-attempt0-node{n}.out").read_text() for n in (0, 1))
    step = metrics(folder)[-1]["step"]
    assert 0 < step < 12 and f"stopped after step {step} of 12 by SIGTERM" in output, output[-3000:]
    assert is_complete(folder / f"checkpoints/step-{step:06}")
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {job}\n"
    second = said(argv, slurm(node, tmp_path, 2, 2, attempt=1) | {"SLURM_JOB_ID": job})
    assert second.returncode == 0, second.stdout + second.stderr
    output = "".join((submit / f"slurm-grpo-{job}-attempt1-node{n}.out").read_text() for n in (0, 1))
    assert f"goes on after step {step}" in output and (tmp_path / "scontrol.txt").read_text().count("requeue") == 1
    train_ranks(4, quick_flags(model, tmp_path / "one", *flags), tmp_path)
    assert_same_end(tmp_path / "one", folder, 12)


def test_E15_two_runs_on_one_machine_at_the_same_time(node, model, tmp_path):
    runs = []
    for name in ("a", "b"):
        flags = quick_flags(model, tmp_path / name, "--max_steps", 3, "--seed", 1)
        env, log = node | {"GPUS": "1"}, (tmp_path / f"{name}.txt").open("w")
        runs.append(subprocess.Popen(
            ["bash", "launch/single_node.sh", str(model), *flags], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
        ))
    for run, name in zip(runs, "ab"):
        assert run.wait(60) == 0, (tmp_path / f"{name}.txt").read_text()[-3000:]
    assert_same_end(tmp_path / "a", tmp_path / "b", 3)
    assert json.loads((tmp_path / "a/run.json").read_text())["wandb_id"] != json.loads((tmp_path / "b/run.json").read_text())["wandb_id"]


def test_a_sweep_calls_torchrun_with_settings_that_exist_and_a_folder_for_each_run(monkeypatch):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load((ROOT / "launch/sweep.yaml").read_text())
    chosen = {name: {"value": p["values"][-1]} for name, p in sweep["parameters"].items()}
    command = create_sweep_command(sweep["command"])
    at = command.index("${args}")
    command = command[:at] + create_sweep_command_args({"args": chosen})["args"] + command[at + 1 :]
    assert command[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "${program}"] and sweep["program"] == "train_grpo.py"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "r7")
    settings = parse_settings(command[4:])
    assert settings.project_dir == "runs/sweep/r7" and settings.seed == 1 and settings.learning_rate == 3e-4


def test_a_run_of_a_sweep_keeps_the_sweeps_id(model, tmp_path):
    flags = quick_flags(model, tmp_path / "run", "--max_steps", 1)
    train_ranks(1, flags, tmp_path, WANDB_SWEEP_ID="s1", WANDB_RUN_ID="r7")
    assert json.loads((tmp_path / "run/r7/run.json").read_text())["wandb_id"] == "r7"
