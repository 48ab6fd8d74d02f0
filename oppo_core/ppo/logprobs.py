"""Log-probs and entropies from hidden states, all at once or in slices that recompute logits in the backward pass.

Logits dominate the memory of an update: with a vocabulary of 152,000, 0.6 MB per token, and three or four times that with
derived tensors. In slices, the logits of only one slice exist at a time.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.activation_checkpointing import checkpoint_slices
from oppo_core.models.host_device import to_device
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.rollout.sampling_support import mask_unsupported
from oppo_core.rollout.sequence import Support
from oppo_estimate.memory import HEAD_SLICE


def response_tokens(tokens: list[NDArray[np.int64]], prompt_lengths: list[int], like: Tensor) -> Tensor:
    """Response tokens [M] of some rows, concatenated, on the device of `like`."""
    tokens_M = np.concatenate([ids[prompt:] for ids, prompt in zip(tokens, prompt_lengths, strict=True)])
    return to_device(tokens_M, like.device)


def token_logprobs(
    network: Network,
    states_MH: Tensor,
    targets_M: Tensor,
    support: Support,
    temperature: float,
    trains_entropy: bool,
    sliced: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] of `targets_M` over their support, and entropies [M], with a gradient if `trains_entropy`."""
    compute = partial(_logprobs, network, temperature, trains_entropy)
    if sliced:
        logp, entropy = checkpoint_slices(compute, states_MH, (targets_M, support))
        return logp, entropy
    return compute(states_MH, targets_M, support)


@torch.no_grad()
def sliced_logprobs(network: Network, states_MH: Tensor, targets_M: Tensor, support: Support, temperature: float) -> Tensor:
    """Log-probs [M] of `targets_M` over their support, without gradients: at most `HEAD_SLICE` tokens per pass over the head."""
    logprobs = []
    for start in range(0, len(states_MH), HEAD_SLICE):
        part = slice(start, start + HEAD_SLICE)
        logits = mask_unsupported(precise(network.logits(states_MH[part])) / temperature, support[part])
        logprobs.append(torch.log_softmax(logits, dim=-1).gather(-1, targets_M[part, None]).squeeze(-1))
    return torch.cat(logprobs)


def next_token_loss(network: Network, states_MH: Tensor, targets_M: Tensor, sliced: bool) -> Tensor:
    """Summed cross-entropy of the tokens `targets_M`, without temperature."""
    compute = partial(_cross_entropy, network)
    return (checkpoint_slices(compute, states_MH, (targets_M,)) if sliced else compute(states_MH, targets_M))[0].sum()


def _logprobs(
    network: Network, temperature: float, trains_entropy: bool, states_MH: Tensor, targets_M: Tensor, support: Support
) -> tuple[Tensor, Tensor]:
    logits = precise(network.logits(states_MH)) / temperature
    logp_MV = torch.log_softmax(mask_unsupported(logits, support), dim=-1)
    del logits
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropy = -(logp_MV.exp() * logp_MV).sum(-1)
    return logp_MV.gather(-1, targets_M[:, None]).squeeze(-1), entropy


def _cross_entropy(network: Network, states_MH: Tensor, targets_M: Tensor) -> tuple[Tensor]:
    return (torch.nn.functional.cross_entropy(precise(network.logits(states_MH)), targets_M, reduction="none"),)
