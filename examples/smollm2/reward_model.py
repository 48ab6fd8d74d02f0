"""A learned reward model: SmolLM2 with a linear head, fitted to the sentiment (VADER) of the model's own responses.

The backbone stays frozen, so the head is a ridge regression of the label on the hidden state of the last token, where the engine
reads the score. Correlation and error are measured on responses to prompts that the fit has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

from oppo_core.rules.sentiment import compound

Say = Callable[[int, str], None]
Labelled = tuple[Tensor, Tensor]
SAMPLES, MAX_NEW_TOKENS, TEMPERATURE = 4, 64, 1.0  # responses per prompt, more varied than those of training
ROWS = 50
PENALTIES = (1.0, 10.0, 100.0, 1000.0)


def train(folder: Path, threads: int, say: Say, seed: int = 0) -> None:
    """Write `folder`/reward, a classifier with one label, from `folder`/model and the prompts of `notes`. What exists is kept."""
    if (folder / "reward").exists():
        return
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    actor = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    parts = {}
    for name in ("notes", "notes-heldout"):
        prompts = [json.loads(line)["prompt"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        parts[name] = label(actor, tokenizer, prompts, lambda share, name=name: say(int(90 * share), f"sampling {name}"))
    weight_D, report = fit(*parts["notes"], *parts["notes-heldout"])
    reward = LlamaForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float32, num_labels=1)
    with torch.no_grad():
        reward.score.weight.copy_(weight_D[None])
    for file in write(reward, tokenizer, folder / "reward"):
        file.chmod(0o644)
    say(100, f"reward model: {report}")


@torch.no_grad()
def label(
    actor: AutoModelForCausalLM, tokenizer: AutoTokenizer, prompts: list, done: Callable[[float], None]
) -> tuple[Tensor, Tensor]:
    """Last hidden states [N, D] and sentiment labels [N] of sampled responses to chat prompts, `SAMPLES` for each."""
    texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts] * SAMPLES
    states, labels = [], []
    for start in range(0, len(texts), ROWS):
        batch = tokenizer(texts[start : start + ROWS], return_tensors="pt", padding=True, add_special_tokens=False)
        width = batch.input_ids.shape[1]
        tokens_NT = actor.generate(
            **batch, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS
        )
        responses_NT = tokens_NT[:, width:]
        # The response includes its first end-of-sequence token; padding, which is the same token, follows.
        ended_NT = (responses_NT == tokenizer.eos_token_id).int()
        mask_NT = torch.cat([batch.attention_mask, (ended_NT.cumsum(1) - ended_NT == 0).long()], 1)
        hidden_NTD = actor.model(tokens_NT, attention_mask=mask_NT).last_hidden_state
        last_N = (mask_NT * torch.arange(mask_NT.shape[1])).argmax(1)
        states.append(hidden_NTD[torch.arange(len(last_N)), last_N])
        labels += [compound("", text) for text in tokenizer.batch_decode(responses_NT, skip_special_tokens=True)]
        done(min(1.0, (start + ROWS) / len(texts)))
    return torch.cat(states), torch.tensor(labels)


def fit(states_ND: Tensor, labels_N: Tensor, unseen_MD: Tensor, unseen_M: Tensor) -> tuple[Tensor, str]:
    """Ridge regression; returns the weights [D] of the best penalty on unseen responses, and its correlation and error there."""
    best: tuple[float, Tensor, str] | None = None
    for penalty in PENALTIES:
        gram_DD = states_ND.T.double() @ states_ND.double() + penalty * torch.eye(states_ND.shape[1], dtype=torch.float64)
        weight_D = torch.linalg.solve(gram_DD, states_ND.T.double() @ labels_N.double())
        scores_M = unseen_MD.double() @ weight_D
        correlation = float(torch.corrcoef(torch.stack([scores_M, unseen_M.double()]))[0, 1])
        error = float((scores_M - unseen_M).square().mean().sqrt())
        report = (
            f"{len(labels_N)} responses; on {len(unseen_M)} others: correlation {correlation:.2f}, error {error:.2f} of"
            f" labels with a standard deviation of {float(unseen_M.std()):.2f} (penalty {penalty:g})"
        )
        if best is None or correlation > best[0]:
            best = correlation, weight_D.float(), report
    assert best is not None
    return best[1], best[2]


def write(reward: LlamaForSequenceClassification, tokenizer: Any, out: Path) -> list[Path]:
    """Write the classifier and its tokenizer into the new folder `out`; returns its files."""
    draft = out.with_name(f".{out.name}.draft")
    reward.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(out)
    return list(out.iterdir())
