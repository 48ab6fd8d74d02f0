"""Work of the engine benchmark: sizes, fixed answer lengths, and the spec of every variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.spec import RunSpec, load_spec

VOCAB, PROMPT_TOKENS, PROMPTS, LONGEST = 2048, 8, 64, 512
CONTEXT = LONGEST + 2 * PROMPT_TOKENS
# Prompts of a published model, shortest and longest.
PUBLISHED_PROMPTS = (30, 200)
PUBLISHED_PASS = 1024  # tokens of a pass: with 49,152 words and 30 layers of width 576 its activations take 2 GB
ADAPTER_RANK = 16
# A padded batch of 16 fits into one pass.
MICRO_BATCH_TOKENS = 16 * CONTEXT


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a network: our own architecture, or a transformers model type (`model_type`)."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocab: int
    model_type: str = "oppo_tiny"
    dtype: str = "float32"
    micro_batch_tokens: int = MICRO_BATCH_TOKENS

    @classmethod
    def tiny(cls, hidden: int, layers: int, heads: int) -> Size:
        """Our own architecture, whose feed-forward layer has four times the hidden width."""
        return cls(hidden, layers, heads, heads, 4 * hidden, VOCAB)

    @property
    def parameters(self) -> int:
        """Weights of one network without biases and norms."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * head * (self.heads + self.key_heads)
        matrices = 2 if self.model_type == "oppo_tiny" else 3  # of the feed-forward layer
        return self.layers * (attention + matrices * self.hidden * self.inner) + self.vocab * self.hidden


NO_CHANGES: Mapping[str, Any] = {}
SIZES = {
    "S": Size.tiny(128, 2, 4),
    "M": Size.tiny(256, 4, 8),
    "L": Size.tiny(512, 8, 8),
    # Shapes of Qwen2.5-0.5B and Qwen2.5-1.5B from their config.json files. Passes are as large as fits beside the four networks
    # and two optimizers in 80 GB: logits over this vocabulary take 0.6 MB per token.
    "G1": Size(896, 24, 14, 2, 4864, 151936, "qwen2", "bfloat16", 4096),
    "G2": Size(1536, 28, 12, 2, 8960, 151936, "qwen2", "bfloat16", 1024),
}


def published_size(folder: Path) -> Size:
    """The size of the model in `folder`, from its config.json, in float32. Raises ValueError if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        inner, vocab, kind = (config[key] for key in ("intermediate_size", "vocab_size", "model_type"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no config.json of a model with the usual sizes ({error}).") from None
    key_heads = config.get("num_key_value_heads") or heads
    return Size(hidden, layers, heads, key_heads, inner, vocab, kind, micro_batch_tokens=PUBLISHED_PASS)


def reshaped(name: str, shape: Mapping[str, int | None]) -> tuple[str, Size]:
    """The size with `hidden`, `layers` or `vocab` replaced, and its new name. Raises ValueError if the heads do not fit."""
    size, changes = SIZES[name], {field: value for field, value in shape.items() if value is not None}
    hidden, layers, vocab = (changes.get(field, getattr(size, field)) for field in ("hidden", "layers", "vocab"))
    if hidden % (2 * size.heads):
        raise ValueError(f"--hidden {hidden} must be a multiple of {2 * size.heads}: size {name} has {size.heads} heads.")
    inner = round(size.inner / size.hidden * hidden)
    named = "-".join([name, *(f"{field}{value}" for field, value in changes.items())])
    return named, replace(size, hidden=hidden, layers=layers, vocab=vocab, inner=inner)


OFF = {"intra_step": "off", "inter_step": "off"}
BOTH = {"intra_step": "per_chunk", "inter_step": "defer"}
VARIANTS: dict[str, dict[str, Any]] = {
    "padded": OFF,
    "sequential": OFF,
    "per_sequence": {"intra_step": "per_sequence", "inter_step": "off"},
    "intra": {"intra_step": "per_chunk", "inter_step": "off"},
    "inter": {"intra_step": "off", "inter_step": "defer"},
    "both": BOTH,
    "all": BOTH | {"update_overlap": True},
}
FLOOR = "floor"
# Variants that fit into a GPU's six minutes.
ON_GPU = ("sequential", "intra", "inter", "both", FLOOR)
# Those of a published model, whose steps take a minute on a CPU.
ON_PUBLISHED = ("sequential", "intra", "inter", "both", "all", FLOOR)
# Update overlap needs two processes with devices of their own.
CPU_ONLY = ("all",)


SHAPES: dict[str, Callable[[float, float, np.random.Generator], float]] = {
    "lognormal": lambda median, sigma, draw: median * np.exp(sigma * draw.normal()),
    # Index 1.2: a heavier tail than the log-normal one.
    "pareto": lambda median, sigma, draw: median * 2 ** (-1 / 1.2) * (1 + draw.pareto(1.2)),
    # Four of five answers are short, the others six times as long as the median.
    "bimodal": lambda median, sigma, draw: median * (0.91 if draw.random() < 0.8 else 6.0) * np.exp(0.3 * draw.normal()),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Length of answer `sequence_id`, independent of the weights: drawn from `given`, or from a distribution with `median`, cut
    to `shortest` … `longest` tokens."""

    seed: int
    median: float = 64.0
    sigma: float = 0.9
    longest: int = LONGEST
    shape: str = "lognormal"
    given: tuple[int, ...] = ()
    shortest: int = 1

    @classmethod
    def read(cls, seed: int, source: str) -> Lengths:
        """From the name of a shape, or a file with one length per line. Raises ValueError for anything else."""
        if source in SHAPES:
            return cls(seed, shape=source)
        try:
            given = tuple(int(line) for line in Path(source).read_text().split())
        except OSError as error:
            raise ValueError(f"{source} is neither {', '.join(SHAPES)} nor a readable file ({error.strerror}).") from None
        except ValueError:
            raise ValueError(f"{source} must contain whole numbers, one per line.") from None
        if not given or not all(1 <= length <= LONGEST for length in given):
            raise ValueError(f"{source} must contain lengths from 1 to {LONGEST}, one per line.")
        return cls(seed, longest=max(given), shape=Path(source).name, given=given)

    def for_published_model(self) -> Lengths:
        """Longer responses, 20 to 400 tokens with a median of 100; those of a file stay."""
        return self if self.given else replace(self, median=100.0, sigma=0.8, shortest=20, longest=400)

    def of(self, sequence_id: int) -> int:
        """Response tokens, EOS included; deterministic for a seed."""
        draw = np.random.Generator(np.random.Philox(key=[self.seed, sequence_id]))
        if self.given:
            return self.given[draw.integers(len(self.given))]
        return int(np.clip(round(SHAPES[self.shape](self.median, self.sigma, draw)), self.shortest, self.longest))


@dataclass(frozen=True, slots=True)
class Load:
    """One case of the benchmark, apart from the kind of overlap."""

    name: str
    size: Size
    batch: int
    lengths: Lengths
    device: str = "cpu"
    max_age: int = 3
    chunk: int = 16
    extra: int | None = None  # Δ; None: half the batch
    model: Path | None = None  # folder of a published model, which is trained by adapters

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of the shortest and the longest prompt."""
        return (PROMPT_TOKENS, PROMPT_TOKENS) if self.model is None else PUBLISHED_PROMPTS

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the engines have room for."""
        return CONTEXT if self.model is None else LONGEST + PUBLISHED_PROMPTS[1]

    @property
    def case(self) -> str:
        """Prefix of its figures' names."""
        return f"{self.name}/B{self.batch}"

    @property
    def overcommit(self) -> int:
        """Δ of the variants with deferral."""
        return self.batch // 2 if self.extra is None else self.extra

    @property
    def left_out(self) -> int:
        """First steps that are not measured, until the pool has its usual mix of ages."""
        return self.max_age + 1


def write_prompts(folder: Path, seed: int, tokens: tuple[int, int] = (PROMPT_TOKENS, PROMPT_TOKENS)) -> Path:
    """Random prompts as token ids that every vocabulary has, their lengths equally spaced from `tokens[0]` to `tokens[1]`."""
    drawn = np.random.Generator(np.random.Philox(key=[seed, 2**32])).integers(3, VOCAB, (PROMPTS, tokens[1]))
    lengths = np.linspace(*tokens, PROMPTS).round().astype(int)
    file = folder / "prompts.jsonl"
    rows = zip(drawn.tolist(), lengths.tolist(), strict=True)
    file.write_text("".join(json.dumps({"prompt": row[:length]}) + "\n" for row, length in rows))
    return file


def build_spec(
    load: Load, overlap: dict[str, Any], models: dict[str, Any], prompts: Path, ppo: Mapping[str, Any] = NO_CHANGES
) -> RunSpec:
    """The spec of one variant; `models` is its section of that name. Only overlap settings differ between variants.

    `ppo`: further settings of that section; with a `group_size` B counts responses all the same.
    """
    group = ppo.get("group_size", 1)
    given = dict(overlap)
    if load.device == "cuda" or load.size.dtype == "bfloat16":  # two processes on CPUs share the update and add in full precision
        given.pop("update_overlap", None)
    changes = {
        "max_age": load.max_age, "chunk": {"size": load.chunk},
        "overcommit": {"controller": "fixed", "initial": load.overcommit // group, "max": load.overcommit // group},
    }  # fmt: skip
    batch = {"batch_size": load.batch // group, "micro_batch_tokens": load.size.micro_batch_tokens, "learning_rate": 1e-6}
    return load_spec(
        {
            "name": "bench", "seed": load.lengths.seed, "steps": 10_000_000,
            "models": models,
            "data": {"prompts": str(prompts)},
            "ppo": {**batch, **ppo},
            "rollout": {"max_new_tokens": LONGEST, "max_prompt_tokens": load.context - LONGEST},
            "overlap": given | changes,
            "resources": {"kind": load.device, "dtype": load.size.dtype},
            "checkpoints": {"every_steps": 10_000_000},
        }
    )  # fmt: skip
