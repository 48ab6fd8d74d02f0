"""From the states that predict tokens to the tokens' log-probs: all at once, or slice by slice.

Logits are the largest thing in an update: over a vocabulary of 152,000 words a token's take 0.6 MB, and three or four times that
with what is made of them. In slices those of one slice live at a time, and are computed a second time for their gradients.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.activation_checkpointing import in_slices
from oppo_core.models.host_device import to_device
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.rollout.sampling_support import restricted
from oppo_core.rollout.sequence import Support


def told_tokens(tokens: list[NDArray[np.int64]], prompt_lengths: list[int], like: Tensor) -> Tensor:
    """The response tokens [M] of some rows, one row after the other, where `like` is."""
    told = np.concatenate([ids[prompt:] for ids, prompt in zip(tokens, prompt_lengths, strict=True)])
    return to_device(told, like.device)


def logprobs_of(
    network: Network, states_MH: Tensor, told_M: Tensor, support: Support, temperature: float, trains_entropy: bool, sliced: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs [M] of `told_M` among their support, and entropies [M], which carry a gradient if `trains_entropy`."""
    compute = partial(_logprobs, network, temperature, trains_entropy)
    if sliced:
        logp, entropy = in_slices(compute, states_MH, (told_M, support))
        return logp, entropy
    return compute(states_MH, told_M, support)


def next_token_loss(network: Network, states_MH: Tensor, told_M: Tensor, sliced: bool) -> Tensor:
    """Summed cross-entropy of the tokens `told_M`, of the model's own distribution."""
    compute = partial(_cross_entropy, network)
    return (in_slices(compute, states_MH, (told_M,)) if sliced else compute(states_MH, told_M))[0].sum()


def _logprobs(
    network: Network, temperature: float, trains_entropy: bool, states_MH: Tensor, told_M: Tensor, support: Support
) -> tuple[Tensor, Tensor]:
    logits = precise(network.logits(states_MH)) / temperature
    logp_MV = torch.log_softmax(restricted(logits, support), dim=-1)
    del logits
    with torch.set_grad_enabled(trains_entropy and torch.is_grad_enabled()):
        entropy = -(logp_MV.exp() * logp_MV).sum(-1)
    return logp_MV.gather(-1, told_M[:, None]).squeeze(-1), entropy


def _cross_entropy(network: Network, states_MH: Tensor, told_M: Tensor) -> tuple[Tensor]:
    return (torch.nn.functional.cross_entropy(precise(network.logits(states_MH)), told_M, reduction="none"),)
