"""train_grpo.py with a fault on rank FAULT_RANK: at train step FAULT_STEP it raises (FAULT=raise) or gets NaN gradients (nan),
or it raises in the middle of its FAULT_STEP-th pass through the layers while sampling (sample)."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pipeline  # noqa: E402
import sampler  # noqa: E402
import train_grpo  # noqa: E402

original, calls = pipeline.Pipeline.train_step, []


def train_step(self, rows, loss_fn):
    calls.append(1)
    here = os.environ["RANK"] == os.environ["FAULT_RANK"] and len(calls) == int(os.environ["FAULT_STEP"])
    if here and os.environ["FAULT"] == "raise":
        raise RuntimeError(f"the injected fault of step {len(calls)}")
    result = original(self, rows, loss_fn)
    if here:
        next(self.stage.parameters()).grad.fill_(float("nan"))
    return result


def through(self, *arguments):
    calls.append(1)
    if os.environ["RANK"] == os.environ["FAULT_RANK"] and len(calls) == int(os.environ["FAULT_STEP"]):
        raise RuntimeError(f"the injected fault of pass {len(calls)}")
    return original_through(self, *arguments)


if os.environ["FAULT"] == "sample":
    original_through, sampler.Sampler._through = sampler.Sampler._through, through
else:
    pipeline.Pipeline.train_step = train_step
train_grpo.main()
