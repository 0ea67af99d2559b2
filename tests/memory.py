"""The most memory that tensors take at one time, counted from every allocation that torch makes, on the CPU."""

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function) -> int:
    """Bytes above what was allocated before the call. Call it in a process of its own (``run_ranks``)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = [(e.start_ns(), e.nbytes()) for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        peak = max(peak, now)
    assert peak > 0
    return peak


def held_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
