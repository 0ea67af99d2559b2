"""Every metric that a run writes: its name, what it says in one line, and, where there is one, the level that raises an alarm.

    python metric_names.py > docs/metrics.md

The names are frozen by a test: a run writes these and no others, and dashboards may rely on them. A ``*`` stands for a
stage number, a phase, the name of a reward term and the like.

Left out: alarms across runs; what a metric should become, which depends on the task.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One name; ``unit`` is empty for shares and plain numbers."""

    name: str
    meaning: str
    unit: str = ""


@dataclass(frozen=True)
class Alarm:
    """Fires when ``name`` is above (or below) ``level`` at ``steps`` steps in a row; says so once until it is over.

    With ``growth`` the level is for what was added since the step before, as for a count.
    """

    name: str
    above: bool
    level: float
    steps: int
    cause: str  # the end of the sentence on the console: the likely cause and what to try
    growth: bool = False


METRICS = [
    Metric("step", "rollouts done, each with its updates; the x-axis of everything"),
    Metric("reward/mean", "mean reward of the rollout with added terms: what advantages are made of"),
    Metric("reward/correct", "the verifier's result alone"),
    Metric("reward/lenient", "as reward/correct, but the format does not count (types with a format)"),
    Metric("reward/term_*", "mean of an added term before its weight: format, overlong, repetition"),
    Metric("reward/unscorable", "completions that the verifier could not judge; they leave the loss"),
    Metric("reward/fault_*", "verifier faults by kind: timeout, crash, exception"),
    Metric("reward/groups_all_right", "share of groups whose completions are all right"),
    Metric("reward/groups_all_wrong", "share of groups whose completions are all wrong"),
    Metric("reward/groups_without_signal", "share of groups with equal rewards, which teach nothing"),
    Metric("advantage/mean", "mean advantage over completions; about 0"),
    Metric("advantage/max", "largest advantage"),
    Metric("advantage/min", "smallest advantage"),
    Metric("completion/length_mean", "mean completion length", "tokens"),
    Metric("completion/length_max", "longest completion", "tokens"),
    Metric("completion/terminated_length_mean", "mean length of the completions that ended by themselves", "tokens"),
    Metric("completion/truncated_share", "share of completions cut at the limit"),
    Metric("completion/tokens", "sampled tokens of the rollout", "tokens"),
    Metric("train/loss", "the loss; near 0 with one update per rollout, where only its gradient says something"),
    Metric("train/loss_policy", "its policy part"),
    Metric("train/loss_kl", "its KL part, beta times KL"),
    Metric("train/tokens", "completion tokens in the loss", "tokens"),
    Metric("train/masked_share", "share of completion tokens left out of the loss"),
    Metric("train/ratio_mean", "mean ratio of policy to old policy; exactly 1 with one update per rollout"),
    Metric("train/ratio_min", "smallest ratio"),
    Metric("train/ratio_max", "largest ratio"),
    Metric("train/clip_low", "share of tokens (gspo: completions) clipped below 1 - epsilon"),
    Metric("train/clip_high", "share clipped above 1 + epsilon_high"),
    Metric("train/kl", "KL to the reference, k3 estimator (with a reference)", "nats"),
    Metric("train/entropy", "mean entropy of the policy at completion tokens", "nats"),
    Metric("train/correction_mean", "mean factor of the sampler correction (when on)"),
    Metric("train/grad_norm", "gradient norm over all stages before clipping"),
    Metric("train/grad_norm_stage*", "its part on one rank"),
    Metric("train/learning_rate", "rate of the update"),
    Metric("train/skipped_updates", "updates left out so far for a loss or gradient that was not finite"),
    Metric("sampler/logprob_diff_mean", "mean absolute difference of trainer's and sampler's log-probs", "nats"),
    Metric("sampler/logprob_diff_max", "the largest one", "nats"),
    Metric("sampler/ratio_mean", "mean importance ratio of trainer to sampler"),
    Metric("sampler/weight_version", "update whose weights the sampler holds"),
    Metric("sampler/weight_checksum", "checksum of those weights (lowest 31 bits)"),
    Metric("time/*", "time of a phase: sample, verify, pack, score, train, optimizer, sync", "s"),
    Metric("time/other", "what no phase covers", "s"),
    Metric("time/step", "the whole step, the sum of the others", "s"),
    Metric("throughput/tokens_per_s", "completion tokens over the whole step's time", "tokens/s"),
    Metric("throughput/sample_tokens_per_s", "completion tokens over the time of sampling", "tokens/s"),
    Metric("throughput/train_tokens_per_s", "completion tokens over the time of forward and backward", "tokens/s"),
    Metric("throughput/mfu", "FLOPs of forward and backward over what the devices could do in that time (known GPUs, or --peak_tflops)"),
    Metric("pipeline/bubble_measured", "idle share of all ranks' time in forward and backward, measured"),
    Metric("pipeline/bubble_theory", "the same with equal stages and free messages"),
    Metric("pipeline/busy_stage*", "share of that time in which one rank computes"),
    Metric("pipeline/microbatches", "microbatches of the step"),
    Metric("pipeline/row_length", "tokens of the longest packed row", "tokens"),
    Metric("pipeline/padding_share", "share of the microbatches' places that hold padding"),
    Metric("pipeline/prompt_tokens_shared", "prompt tokens saved since a group shares one copy", "tokens"),
    Metric("memory/peak_stage*", "most memory of one rank's process so far (CPU) or of its tensors in this step (GPU)", "MiB"),
    Metric("validation/accuracy", "share of held-out questions answered right (mean over samples)"),
    Metric("validation/accuracy_*", "by verify type, by difficulty, lenient, and the ends of its 95 % interval (low, high)"),
    Metric("validation/avg_at_*", "mean accuracy over k samples a question"),
    Metric("validation/pass_at_*", "unbiased chance that one of k samples is right"),
    Metric("validation/maj_at_*", "accuracy of the answer that most of k samples give"),
    Metric("validation/length_mean", "mean completion length in validation", "tokens"),
    Metric("validation/truncated_share", "share of validation completions cut at the limit"),
    Metric("validation/fault_*", "verifier faults in validation by kind"),
    Metric("metrics/nonfinite", "values so far that were not finite and are written as null"),
]

ALARMS = [
    Alarm("reward/groups_without_signal", True, 0.95, 5, "nearly all groups are all right or all wrong, so nothing is learned: "
          "choose easier or harder questions, or a larger --group_size"),
    Alarm("reward/unscorable", True, 0, 1, "the verifier could not judge some completions: look at reward/fault_* and at the golds"),
    Alarm("completion/truncated_share", True, 0.5, 5, "most completions are cut at the limit and count as wrong: raise --max_completion_tokens "
          "or add --overlong_weight"),
    Alarm("train/entropy", False, 0.01, 5, "the policy has become nearly deterministic, and equal samples teach nothing: lower --learning_rate, "
          "or raise --epsilon_high or --temperature"),
    Alarm("train/kl", True, 1.0, 5, "the policy is far from the reference: lower --learning_rate or raise --beta"),
    Alarm("train/grad_norm", True, 100.0, 3, "gradients are very large: lower --learning_rate and look at the rewards"),
    Alarm("train/clip_high", True, 0.3, 3, "the updates of one rollout go far beyond the clip range: lower --learning_rate or --grpo_iterations"),
    Alarm("train/skipped_updates", True, 0, 1, "an update was left out for a loss or gradient that is not finite: lower --learning_rate",
          growth=True),
    Alarm("train/tokens", False, 1, 1, "no completion token is in the loss, so its value of 0 says nothing: look at reward/unscorable and --mask_truncated"),
    Alarm("sampler/logprob_diff_mean", True, 0.05, 3, "sampler and trainer disagree about the same tokens: use the same dtype in both, "
          "or --sampler_correction token_truncate"),
    Alarm("sampler/ratio_mean", True, 1.1, 3, "the sampler draws from another policy than the one trained: --sampler_correction token_truncate helps, "
          "a newer sampler weight_version is the cure"),
    Alarm("pipeline/padding_share", True, 0.5, 5, "most of what is computed is padding: leave --row_length at 0 and lower --microbatch_size"),
]


def meaning_of(name: str) -> Metric | None:
    """The entry of a name that a run wrote; an exact one before a pattern."""
    return next(
        (m for m in sorted(METRICS, key=lambda m: "*" in m.name) if fnmatch.fnmatchcase(name, m.name)), None
    )


class Alarms:
    """Counts for how many steps in a row each level has been passed."""

    def __init__(self, alarms: list[Alarm] = ALARMS):
        self.counts = {alarm: 0 for alarm in alarms}
        self.before: dict[str, float] = {}  # values of the last step

    def check(self, values: dict[str, float]) -> list[str]:
        """One sentence for each alarm that fires at this step, with the value, the level and the likely cause."""
        fired = []
        for alarm, count in self.counts.items():
            value = values.get(alarm.name)
            if value is None:
                continue
            value -= self.before.get(alarm.name, 0) if alarm.growth else 0
            passed = value > alarm.level if alarm.above else value < alarm.level
            self.counts[alarm] = count + 1 if passed else 0
            if self.counts[alarm] == alarm.steps:
                for_long = f" for {alarm.steps} steps" if alarm.steps > 1 else ""
                side = "above" if alarm.above else "below"
                fired.append(f"{alarm.name} is {value:.3g}, {side} {alarm.level:g}{for_long}: {alarm.cause}")
        self.before |= values
        return fired


def as_markdown() -> str:
    """docs/metrics.md: every name, its meaning, its unit, its alarm level."""
    lines = [
        "# Metrics", "",
        "A run writes these names to `metrics.jsonl` and to W&B, and no others; made by `python metric_names.py > docs/metrics.md`.",
        "`*` stands for a stage, a phase, a term or a number of samples. An alarm is one sentence on the console, printed once when the level has been",
        "passed for that many steps in a row.", "",
        "| name | meaning | unit | alarm |", "|---|---|---|---|",
    ]
    for m in METRICS:
        levels = [
            f"{'above' if a.above else 'below'} {a.level:g}" + (f" for {a.steps} steps" if a.steps > 1 else "")
            for a in ALARMS if a.name == m.name
        ]
        lines.append(f"| `{m.name}` | {m.meaning} | {m.unit} | {', '.join(levels)} |")
    lines += ["", "## What the console says", ""]
    lines += [f"* `{a.name}`: {a.cause}." for a in ALARMS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
