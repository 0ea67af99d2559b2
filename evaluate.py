"""Validation: the share of held-out questions that the policy answers right, sampled as in training.

Every question has its own random stream that does not depend on the step, so that two validations differ by the weights
alone; the denominator is always the number of questions.
"""

from __future__ import annotations

from drawing import Sampling
from policy import Policy
from rewards import grade, lenient, take_faults
from rollout import Completion, decode
from tasks import Question

VALIDATION_STREAM = 2**31  # no rollout has this number


def evaluate(
    policy: Policy, questions: list[Question], sampling: Sampling, *, seed: int
) -> tuple[dict[str, float], list[Completion]]:
    """Sample one completion per question and grade it; call on every stage.

    Args:
        questions: on the first stage; the others may pass an empty list.

    Returns:
        On the first stage the metrics (``validation/accuracy``, ``validation/length_mean`` in tokens,
        ``validation/truncated_share``) and the completions; empty elsewhere. An unscorable completion counts as wrong.
    """
    prompts = policy.mesh.broadcast([q.prompt_ids for q in questions])
    completions = policy.generate(prompts, group_size=1, sampling=sampling, stream=(seed, VALIDATION_STREAM))
    if not policy.mesh.is_first:
        return {}, []
    decode(completions, policy.tokenizer, policy.stop_ids)
    graded = [(c.text, questions[c.question]) for c in completions]
    rewards = grade(graded)
    for c, reward in zip(completions, rewards):
        c.correct = reward
    count = len(questions)
    metrics = {
        "validation/accuracy": sum(r == 1.0 for r in rewards) / count,
        "validation/length_mean": sum(len(c.ids) for c in completions) / count,
        "validation/truncated_share": sum(not c.finished for c in completions) / count,
    }
    judged = [value for value in lenient(graded, rewards) if value is not None]
    if judged:  # types with a format: what it would be if only the answer counted
        metrics["validation/accuracy_lenient"] = sum(judged) / count
    metrics |= {f"validation/fault_{kind}": count for kind, count in take_faults().items()}
    return metrics, completions
