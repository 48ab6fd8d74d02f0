"""Example of your own models: actor, reward model and prompts, as Hugging Face folders and JSON Lines.

    python -m examples.own.make .oppo/models/own

The actor is a tiny Llama that writes kind, mixed or unkind product reviews. The reward model starts from it and learns from
pairs to prefer kind reviews. Both train in seconds on one core; nothing is downloaded. Replace them by any model folder with
config.json, safetensors and tokenizer.json that docs/models.md lists.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from .reviews import CONTEXT, WORDS, draw_prompt, draw_review, kindness

PAD, BOS, EOS, SEP = "<pad>", "<bos>", "<eos>", "<sep>"
SPECIAL = (PAD, BOS, EOS, SEP)
BATCH = 24
BATCHES = 150


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to fill, below a worker's models root")
    parser.add_argument("--fast", action="store_true", help="a tenth of the training: for tests, learns little")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    for name in ("actor", "reward", "prompts.jsonl", "heldout.jsonl"):
        if (arguments.out / name).exists():
            parser.error(f"{arguments.out / name} already exists; use another folder, or delete it")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # more threads are not faster at this width
    transformers.utils.logging.disable_progress_bar()
    make(arguments.out, random.Random(arguments.seed), batches=BATCHES // 10 if arguments.fast else BATCHES)


def make(out: Path, rng: random.Random, batches: int) -> None:
    """Write the models and prompts into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    actor = LlamaForCausalLM(architecture(tokenizer))
    loss = train(actor, lambda: language_loss(actor, tokenizer, rng), batches)
    print(f"actor: loss {loss:.2f} nats a token")
    reward = LlamaForSequenceClassification(architecture(tokenizer, num_labels=1))
    reward.model.load_state_dict(actor.model.state_dict())
    loss = train(reward, lambda: preference_loss(reward, tokenizer, rng), batches)
    print(f"reward model: loss {loss:.2f} nats a pair (0.69 is guessing)")
    rescale(reward, tokenizer, rng)
    for name, model in (("actor", actor), ("reward", reward)):
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    for name, count in (("prompts", 2000), ("heldout", 64)):
        lines = (json.dumps({"prompt": draw_prompt(rng)}) for _ in range(count))
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer; a prompt encodes as `<bos> … <sep>`."""
    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(ids))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {SEP}", special_tokens=[(BOS, ids[BOS]), (SEP, ids[SEP])]
    )
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "sep_token": SEP}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=["input_ids", "attention_mask"], **special)


def architecture(tokenizer: PreTrainedTokenizerFast, **more: int) -> LlamaConfig:
    """The smallest Llama that learns the task."""
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **more,
    )  # fmt: skip


@torch.no_grad()
def rescale(reward: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
    """Scale scores of ordinary reviews to a standard deviation of 1, which suits the default value clipping."""
    prompts = [draw_prompt(rng) for _ in range(8 * BATCH)]
    scores_N = reward(encode(tokenizer, [(prompt, draw_review(rng, prompt)) for prompt in prompts])[0]).logits[:, 0]
    reward.score.weight.div_(scores_N.std())


def train(model: nn.Module, draw_loss: Callable[[], Tensor], batches: int) -> float:
    """AdamW with a one-cycle learning rate; returns the mean loss of the last tenth of the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=batches)
    losses = []
    for _ in range(batches):
        loss = draw_loss()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-batches // 10 :]) / len(losses[-batches // 10 :])


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Right-padded token ids [N, T] of (prompt, review) pairs, and the mask of review tokens [N, T]."""
    rows, starts = [], []
    for prompt, review in texts:
        head = tokenizer.encode(prompt)
        rows.append(head + tokenizer.encode(review, add_special_tokens=False) + [tokenizer.eos_token_id])
        starts.append(len(head))
    tokens_NT = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, tokenizer.pad_token_id)
    position_T = torch.arange(tokens_NT.shape[1])
    ends_N1, starts_N1 = (torch.tensor(numbers)[:, None] for numbers in ([len(row) for row in rows], starts))
    return tokens_NT, (position_T >= starts_N1) & (position_T < ends_N1)


def language_loss(actor: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Tensor:
    """Mean cross-entropy of review tokens in all moods, nats."""
    prompts = [draw_prompt(rng) for _ in range(BATCH)]
    tokens_NT, review_NT = encode(tokenizer, [(prompt, draw_review(rng, prompt)) for prompt in prompts])
    logits_NTV = actor(tokens_NT).logits[:, :-1]
    return F.cross_entropy(logits_NTV[review_NT[:, 1:]], tokens_NT[:, 1:][review_NT[:, 1:]])


def preference_loss(reward: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Tensor:
    """Mean −log sigmoid(score of the kinder review − score of the other) over pairs of reviews."""
    pairs = []
    for _ in range(BATCH // 2):
        prompt = draw_prompt(rng)
        pairs += [(prompt, review) for review in sorted((draw_review(rng, prompt), draw_review(rng, prompt)), key=kindness)]
    scores_N = reward(encode(tokenizer, pairs)[0]).logits[:, 0]
    return -F.logsigmoid(scores_N[1::2] - scores_N[0::2]).mean()


if __name__ == "__main__":
    main()
