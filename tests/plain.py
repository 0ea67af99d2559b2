"""The same numbers without this project's stages, rows' masks or pipeline: transformers' own model, plain formulas and
torch's own AdamW and ``clip_grad_norm_``, all in this one process. What the other tests compare with."""

import torch

from grpo_loss import LossSettings, policy_loss

EPSILON, EPSILON_HIGH, BETA = 0.2, 0.28, 0.1
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-2, 0.1, 0.05


def difference(a, b) -> float:
    """Largest absolute difference over the largest absolute value; 0 for two empty or two zero tensors."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    if not a.numel():
        return 0.0
    gap, size = (a - b).abs().max().item(), b.abs().max().item()
    return gap if gap != gap else gap / size if size else (0.0 if gap == 0 else float("inf"))


def who_sees_whom(rows, m: int, window: int | None = None) -> torch.Tensor:
    """[1, 1, T, T] of one row, pair by pair: True where the query (third axis) sees the key."""
    group, segment, position = (x[m].tolist() for x in (rows.group_ids, rows.segment_ids, rows.position_ids))
    length = len(group)
    sees = torch.zeros(1, 1, length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(q + 1):
            related = group[q] == group[k] >= 0 and segment[k] in (0, segment[q])
            near = window is None or position[q] - position[k] < window
            sees[0, 0, q, k] = q == k or (related and near)
    return sees


def packed_masks(config, rows, m: int):
    """The mask of row ``m`` in the form that transformers' model of this kind takes."""
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return who_sees_whom(rows, m, window)
    if window is None or set(config.layer_types) == {"full_attention"}:
        return who_sees_whom(rows, m)
    return {"full_attention": who_sees_whom(rows, m), "sliding_attention": who_sees_whom(rows, m, window)}


def packed_logprobs(model, rows, temperature: float = 1.0):
    """Log-prob and entropy [M, T] of the completion tokens by transformers' model on the same rows, 0 elsewhere."""
    logprobs, entropies = [], []
    for m in range(rows.shape[0]):
        logits = model(
            input_ids=rows.input_ids[m : m + 1], attention_mask=packed_masks(model.config, rows, m),
            position_ids=rows.position_ids[m : m + 1], use_cache=False,
        ).logits[0]
        law = torch.log_softmax(logits / temperature, dim=-1)
        inside = rows.segment_ids[m] > 0
        of_token = law[rows.predictor[m], rows.input_ids[m]]
        logprobs.append(torch.where(inside, of_token, 0.0))
        entropy = -(law.exp() * law).sum(-1)[rows.predictor[m]]
        entropies.append(torch.where(inside, entropy, 0.0).detach())
    return torch.stack(logprobs), torch.stack(entropies)


def sequence_logprobs(model, completion, temperature: float = 1.0):
    """Log-probs of one completion's tokens: its plain sequence through transformers, no packing and no mask at all."""
    ids = torch.tensor([completion.prompt_ids + completion.ids])
    law = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0] / temperature, dim=-1)
    prompt = len(completion.prompt_ids)
    return law[torch.arange(prompt - 1, ids.shape[1] - 1), ids[0, prompt:]]


def plain_loss(logprob, advantage, weight, old_logprob, ref_logprob):
    """Clipped objective and k3, token by token, summed with weights."""
    ratio = torch.exp(logprob - old_logprob)
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH)
    policy = -torch.minimum(ratio * advantage, clipped * advantage)
    d = ref_logprob - logprob
    return (weight * (policy + BETA * (torch.exp(d) - d - 1))).sum()


def loss_of_columns(output, c, settings=LossSettings(epsilon=EPSILON, epsilon_high=EPSILON_HIGH, beta=BETA)):
    """The same loss as a pipeline takes it: from the last stage's output and the columns of the target."""
    return policy_loss(
        output[..., 0], c["advantage"], c["weight"], c["old_logprob"], c["ref_logprob"], c["sampler_logprob"],
        c["sequence"].long(), settings,
    )


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)


def gradients(model) -> dict:
    """By Hugging Face name; a tied head has none of its own."""
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def plain_step(model, rows) -> dict:
    """One clipped AdamW step on ``rows``; everything there is to compare. ``model`` is left as it was."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logprob, entropy = packed_logprobs(model, rows)
    loss = plain_loss(logprob, rows.advantage, rows.weight, rows.old_logprob, rows.ref_logprob)
    loss.backward()
    out = dict(logprob=logprob.detach(), entropy=entropy, loss=loss.item(), gradients=gradients(model))
    out["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    adamw(model.parameters()).step()
    out["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    model.zero_grad()
    return out


def fill_columns(rows, seed: int = 0, spread: float = 0.3):
    """Old and reference log-probs near those of a nearly even law over 96 tokens, far enough apart to be clipped."""
    g = torch.Generator().manual_seed(seed)
    old, ref = (spread * torch.randn(rows.shape, generator=g, dtype=torch.float64) - 4.6 for _ in range(2))
    rows.old_logprob = torch.where(rows.sequence >= 0, old, 0.0).to(rows.weight.dtype)
    rows.ref_logprob = torch.where(rows.sequence >= 0, ref, 0.0).to(rows.weight.dtype)
    return rows


def by_completion(rows, values, count: int) -> list:
    """The values [M, T] of each completion's tokens, in their order, wherever the completion stands."""
    return [values[rows.sequence == i] for i in range(count)]


def put_by_completion(rows, parts) -> torch.Tensor:
    """The inverse: [M, T] with the parts at their completions' places, 0 elsewhere."""
    out = torch.zeros(rows.shape, dtype=rows.weight.dtype)
    for i, part in enumerate(parts):
        out[rows.sequence == i] = part.to(out.dtype)
    return out
