"""Create what the example specs refer to: prompts, a pre-trained actor, a learned reward model, and a report.

    python -m examples.letters.prepare --out DIR/letters        # then: oppo train … --root DIR

Takes under a minute on two cores. An existing DIR of the same code and settings is reused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

import oppo_core.models.tiny_transformer
import oppo_core.rules.letters
from oppo_core.models.model_io import save_tiny
from oppo_core.models.tiny_transformer import TinyTransformer

from .batches import Row
from .grammar import MAX_NEW_TOKENS, draw_prompt
from .pretrain import pretrain
from .report import response_statistics, reward_statistics
from .reward_model import normalize, train_reward_model
from .sampling import sample_responses
from .vocabulary import BOS, EOS, PAD, build_tokenizer, token_id, write_tokenizer

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and seed. Equal settings and code give equal files."""

    seed: int = 0
    train_prompts: int = 4000
    heldout_prompts: int = 256
    pretraining_answers: int = 6000  # in each of two phases
    compared_prompts: int = 1200
    sampled_answers: int = 512


FAST = Settings(train_prompts=200, heldout_prompts=32, pretraining_answers=400, compared_prompts=60, sampled_answers=32)


def prepare(out: Path, settings: Settings, progress: Progress) -> bool:
    """Fill `out`, unless it is up to date with settings and code.

    Args:
        progress: called with the share done, 0 … 1, and the current activity.

    Returns:
        Whether `out` was written. It is replaced atomically.
    """
    digest = source_digest(settings)
    if saved_digest(out) == digest:
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "new"
        statistics = make(fresh, settings, progress)
        (fresh / "report.json").write_text(
            json.dumps({"digest": digest, "settings": asdict(settings), **statistics}, indent=2) + "\n"
        )
        if out.exists():
            os.rename(out, Path(scratch) / "old")
        os.rename(fresh, out)
    return True


def make(folder: Path, settings: Settings, progress: Progress) -> dict[str, object]:
    """Write prompts and models into `folder`; return the report's statistics."""
    start = time.monotonic()
    tokenizer = build_tokenizer()
    heldout = write_prompts(folder, settings)
    actor, loss = pretrain(
        tokenizer, settings.pretraining_answers, settings.seed, lambda share: progress(0.45 * share, "pre-training the actor")
    )
    progress(0.45, "sampling responses")
    prompts = [heldout[i % len(heldout)] for i in range(settings.sampled_answers)]
    responses = sample_responses(actor, tokenizer, prompts, MAX_NEW_TOKENS, settings.seed)
    reward = train_reward_model(
        actor,
        tokenizer,
        settings.compared_prompts,
        settings.seed,
        lambda share: progress(0.5 + 0.45 * share, "training the reward model"),
    )
    rows = [Row(head + response, len(head)) for response, head in zip(responses, encode_prompts(tokenizer, prompts), strict=True)]
    normalize(reward, rows)
    for name, model in (("actor", actor), ("reward", reward)):
        write_model(model, folder / name)
    statistics = {
        "actor": {"loss": loss, **response_statistics(tokenizer, prompts, responses)},
        "reward": reward_statistics(reward, tokenizer, prompts, rows, settings.seed),
    }
    progress(1.0, "done")
    return {"seconds": round(time.monotonic() - start, 1), **statistics}


def encode_prompts(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    """Token ids of prompts, including `<bos>` and `<sep>`."""
    return [encoding.ids for encoding in tokenizer.encode_batch(prompts)]


def write_prompts(folder: Path, settings: Settings) -> list[str]:
    """Write prompts.jsonl and heldout.jsonl; return the held-out prompts."""
    folder.mkdir(parents=True)
    rng = random.Random(settings.seed)
    for name, count in (("prompts", settings.train_prompts), ("heldout", settings.heldout_prompts)):
        prompts = [draw_prompt(rng, held_out=name == "heldout") for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return prompts


def write_model(model: TinyTransformer, folder: Path) -> None:
    """Write a model folder with its tokenizer."""
    write_tokenizer(folder)
    save_tiny(model, folder, pad_token_id=token_id(PAD), bos_token_id=token_id(BOS), eos_token_id=token_id(EOS))


def saved_digest(out: Path) -> str | None:
    """The digest stored in `out`, or None."""
    report = out / "report.json"
    return str(json.loads(report.read_text())["digest"]) if report.exists() else None


def source_digest(settings: Settings) -> str:
    """SHA-256 of the settings and of all sources that affect the result."""
    engine = (oppo_core.rules.letters, oppo_core.models.tiny_transformer)
    sources = sorted(Path(__file__).parent.glob("*.py")) + [Path(str(module.__file__)) for module in engine]
    sha = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for source in sources:
        sha.update(source.read_bytes())
    return sha.hexdigest()


class PercentLines:
    """Prints a line every five percent."""

    def __init__(self) -> None:
        self.printed = -1

    def __call__(self, share: float, activity: str) -> None:
        twentieth = int(share * 20)
        if twentieth > self.printed:
            self.printed = twentieth
            print(f"{twentieth * 5:3d} % {activity}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to fill; its parent is the engine's --root")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true", help="a tenth of the work: for tests, learns little")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    settings = Settings(**{**asdict(FAST if arguments.fast else Settings()), "seed": arguments.seed})
    written = prepare(arguments.out, settings, PercentLines())
    print(f"{arguments.out}: {'ready' if written else 'ready already'}")


if __name__ == "__main__":
    main()
