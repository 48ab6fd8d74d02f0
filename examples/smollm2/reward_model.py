"""A learned reward model: SmolLM2 with a head, trained on the sentiment (VADER) of the model's own responses.

Every prefix of a response has a label of its own, so a few hundred responses give tens of thousands of labels, and the score of
the last token is that of the whole response. Only the upper blocks and the head are trained; the states below them are computed
once. Correlation and error are measured on whole responses to prompts that training has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForSequenceClassification

from oppo_core.rules.sentiment import compound

Say = Callable[[int, str], None]
SAMPLES, MAX_NEW_TOKENS, TEMPERATURE = 2, 64, 1.0  # responses per prompt, more varied than those of training
SAMPLING_ROWS, ROWS, EPOCHS, LEARNING_RATE = 50, 10, 4, 2e-4
UPPER_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Labelled:
    """Right-padded rows: tokens [N, T], label of the response up to each token [N, T] (NaN elsewhere), last token [N]."""

    tokens_NT: Tensor
    labels_NT: Tensor
    last_N: Tensor


def train(folder: Path, threads: int, say: Say, seed: int = 0) -> None:
    """Write `folder`/reward, a classifier with one label, from `folder`/model and the prompts of `notes`. What exists is kept."""
    if (folder / "reward").exists():
        return
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    actor = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    trained, unseen = (
        label(tokenizer, sample(actor, tokenizer, read_prompts(folder / f"{name}.jsonl"), say, name, first))
        for name, first in (("notes", 0), ("notes-heldout", 25))
    )
    reward = LlamaForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float32, num_labels=1)
    torch.nn.init.zeros_(reward.score.weight)
    for share, loss in fit(reward, trained):
        say(50 + int(48 * share), f"training the reward model: mean squared error {loss:.3f}")
    say(100, f"reward model: {len(trained.last_N)} responses; {report(reward, unseen)}")
    write(reward, tokenizer, folder / "reward")


def read_prompts(file: Path) -> list[Any]:
    """The prompts of a JSON Lines file."""
    return [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def sample(actor: Any, tokenizer: Any, prompts: list[Any], say: Say, name: str, first: int) -> list[tuple[list[int], list[int]]]:
    """Token ids of (prompt, response) for `SAMPLES` responses to each chat prompt, with their end-of-sequence token.

    `first`: progress at the beginning, percent.
    """
    texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts] * SAMPLES
    rows: list[tuple[list[int], list[int]]] = []
    for start in range(0, len(texts), SAMPLING_ROWS):
        say(first + 25 * start // len(texts), f"sampling responses of {name}")
        batch = tokenizer(texts[start : start + SAMPLING_ROWS], return_tensors="pt", padding=True, padding_side="left")
        width = batch.input_ids.shape[1]
        drawn_NT = actor.generate(
            **batch, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS
        )
        for ids, mask in zip(drawn_NT.tolist(), batch.attention_mask.tolist(), strict=True):
            response = ids[width:]
            length = response.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in response else len(response)
            rows.append((ids[width - sum(mask) : width], response[:length]))
    return rows


def label(tokenizer: Any, rows: list[tuple[list[int], list[int]]]) -> Labelled:
    """Sentiment of every prefix of the responses."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    tokens_NT = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels_NT = torch.full((len(rows), longest), torch.nan)
    last_N = torch.tensor([len(prompt) + len(response) - 1 for prompt, response in rows])
    for row, (prompt, response) in enumerate(rows):
        tokens_NT[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        prefixes = tokenizer.batch_decode([response[: n + 1] for n in range(len(response))], skip_special_tokens=True)
        labels_NT[row, len(prompt) : last_N[row] + 1] = torch.tensor([compound("", prefix) for prefix in prefixes])
    return Labelled(tokens_NT, labels_NT, last_N)


def fit(reward: Any, data: Labelled) -> Iterator[tuple[float, float]]:
    """Train the upper blocks and the head with AdamW and a one-cycle learning rate; yields (share done, loss) now and then."""
    with torch.no_grad():
        lower_NTD = torch.cat([_blocks(reward, part, False) for part in data.tokens_NT.split(ROWS)])
    parameters = [*reward.model.layers[-UPPER_BLOCKS:].parameters(), *reward.model.norm.parameters(), reward.score.weight]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)
    steps = EPOCHS * -(-len(lower_NTD) // ROWS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    orders = [torch.randperm(len(lower_NTD)).split(ROWS) for _ in range(EPOCHS)]
    for step, rows in enumerate(part for order in orders for part in order):
        scores_NT = _scores(reward, lower_NTD[rows])
        known_NT = ~data.labels_NT[rows].isnan()
        loss = (scores_NT - data.labels_NT[rows])[known_NT].square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 5 == 0:
            yield step / steps, loss.item()


@torch.no_grad()
def report(reward: Any, data: Labelled) -> str:
    """Correlation and error of the scores of whole responses."""
    scores_N, rows_N = torch.empty(len(data.last_N)), torch.arange(len(data.last_N))
    for rows in rows_N.split(ROWS):
        scores_N[rows] = _scores(reward, _blocks(reward, data.tokens_NT[rows], False))[torch.arange(len(rows)), data.last_N[rows]]
    labels_N = data.labels_NT[rows_N, data.last_N]
    correlation = float(torch.corrcoef(torch.stack([scores_N, labels_N]))[0, 1])
    error, deviation = float((scores_N - labels_N).square().mean().sqrt()), float(labels_N.std())
    return f"on {len(labels_N)} others correlation {correlation:.2f}, error {error:.2f} (standard deviation {deviation:.2f})"


def _scores(reward: Any, lower_NTD: Tensor) -> Tensor:
    """Scores [N, T] of every prefix, from the states below the upper blocks."""
    return reward.score(reward.model.norm(_blocks(reward, lower_NTD, True)))[..., 0]  # type: ignore[no-any-return]


def _blocks(reward: Any, given: Tensor, upper: bool) -> Tensor:
    """States [N, T, D] after the upper blocks (`given`: states below them) or after the lower ones (`given`: tokens).

    Rows are right-padded, so a causal mask alone keeps padding out.
    """
    model, count = reward.model, len(reward.model.layers) - UPPER_BLOCKS
    states_NTD = given if upper else model.embed_tokens(given)
    positions_1T = torch.arange(states_NTD.shape[1])[None]
    rotary = model.rotary_emb(states_NTD, positions_1T)
    for block in model.layers[count:] if upper else model.layers[:count]:
        states_NTD = block(states_NTD, attention_mask=None, position_ids=positions_1T, position_embeddings=rotary)
    return states_NTD


def write(reward: Any, tokenizer: Any, out: Path) -> None:
    """Write the classifier and its tokenizer into the new folder `out`, readable to a worker's account."""
    draft = out.with_name(f".{out.name}.draft")
    reward.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    for file in draft.iterdir():
        file.chmod(0o644)
    draft.rename(out)
