"""Virtual devices of the simulator: groups, placement of the models, and costs. Read from YAML or JSON.

Times are in microseconds of one device (`…_us`), per pass, row, token or step as the field says; sizes in bytes. A divisible
cost on n devices takes 1 / (1 + (n − 1) · parallel) of its time on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oppo_contract.spec_errors import SpecError
from oppo_contract.yaml_text import parse_yaml

Cost = Annotated[float, Field(ge=0)]
Bytes = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Parallel = Annotated[float, Field(ge=0, le=1, description="What each further device adds to the speed of one.")]
ReadingRole = Literal["reward", "reference", "critic"]
READING_ROLES: tuple[ReadingRole, ...] = ("reward", "reference", "critic")
ACTOR_GROUP = "actor"


class DevicesError(ValueError):
    """An invalid description of virtual devices; the message names the field."""


class Part(BaseModel):
    """Base of the description's parts: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Decode(Part):
    """One decode step over n rows costs round_us + (n · row_us + cached tokens · cached_token_us) ÷ speed."""

    round_us: Cost = Field(description="A round, however few rows it has.")
    row_us: Cost = Field(description="A row in a round.")
    cached_token_us: Cost = Field(0.0, description="A cached token that a round attends to.")
    parallel: Parallel = 1.0


class Reading(Part):
    """A forward pass over n tokens costs pass_us + n · token_us ÷ speed."""

    pass_us: Cost = Field(0.0, description="A pass, however few tokens it has.")
    token_us: Cost = Field(description="A token.")
    parallel: Parallel = 1.0
    gathered_bytes: Bytes = Field(0.0, description="Sharded weights that a pass, and the decoder, gather.")
    units: int = Field(1, ge=1, description="Parts of the model whose weights are gathered one after another.")


class Training(Reading):
    """A forward pass as in `Reading`, a backward pass and an optimizer step."""

    backward_us: Cost = Field(description="Backward pass, a token.")
    optimizer_us: Cost = Field(0.0, description="One optimizer step.")
    trained_bytes: Bytes = Field(0.0, description="Gradients that the ranks sum.")


class Costs(Part):
    """Costs of the models. A rule instead of a reward model costs `overheads.score_us` per response."""

    decode: Decode
    actor: Training
    reward: Reading
    reference: Reading
    critic: Training


class Overheads(Part):
    """Costs besides the models."""

    prompt_us: Cost = Field(0.0, description="Drawing one prompt.")
    weights_us: Cost = Field(0.0, description="Handing new weights to the decoder, a step.")
    handover_us: Cost = Field(0.0, description="A hand-over to the scorers, on the actor's side.")
    handover_row_us: Cost = Field(0.0, description="The same, a sequence.")
    score_us: Cost = Field(0.0, description="Completing one answer's score.")
    advantage_us: Cost = Field(0.0, description="Rewards and advantages, a token.")
    report_us: Cost = Field(0.0, description="Writing a step's events.")
    checkpoint_us: Cost = Field(0.0, description="Writing a checkpoint.")


class Ranks(Part):
    """Data-parallel ranks: each device has rows of its own, and all go on when the slowest one is done.

    The time of collectives is that of a ring: each device receives what it lacks from its node, each node from the network, and
    the slower link decides. A link without a speed takes no time.
    """

    per_node: int = Field(8, ge=1, description="Devices of a node.")
    node_bytes_s: Rate | None = Field(None, description="Bytes per second that a device receives from the others of its node.")
    network_bytes_s: Rate | None = Field(None, description="Bytes per second that a node receives from the others.")
    collective_us: Cost = Field(0.0, description="A collective, however few bytes it has.")

    def collectives_us(self, count: int, size: float, calls: int = 1) -> float:
        """All-gathers or reduce-scatters of `size` bytes over `count` ranks in `calls` collectives. An all-reduce is both."""
        if count == 1:
            return 0.0
        nodes = -(-count // self.per_node)
        within = _transfer_us(size, count, self.node_bytes_s)
        return calls * self.collective_us + max(within, _transfer_us(size, nodes, self.network_bytes_s))


def _transfer_us(size: float, parts: int, bytes_s: float | None) -> float:
    """What one of `parts` equal holders of `size` bytes lacks, through a link of this speed."""
    return 0.0 if bytes_s is None else 1e6 * size * (parts - 1) / parts / bytes_s


class LogNormal(Part):
    """Lengths with median `median` tokens and standard deviation `sigma` of their logarithm, at most `rollout.max_new_tokens`."""

    kind: Literal["log-normal"] = "log-normal"
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)


class Listed(Part):
    """Lengths drawn uniformly from a list."""

    kind: Literal["list"] = "list"
    values: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)


class Curve(Part):
    """Scores: first + (last − first) · (1 − e^(−v / steps)) + noise · N(0, 1), where v is the mean policy version of the
    response's tokens. The Δ controller thus sees a reward that rises, flattens, and lags with stale tokens."""

    first: float = 0.0
    last: float = 1.0
    steps: float = Field(100.0, gt=0)
    noise: float = Field(0.3, ge=0)


class Workload(Part):
    """The workload, as far as the spec does not define it."""

    lengths: LogNormal | Listed = Field(LogNormal(median=64, sigma=0.9), discriminator="kind")
    prompt_tokens: int = Field(16, ge=1, description="Length of every prompt; cut at `rollout.max_prompt_tokens`.")
    scores: Curve = Curve()


class Devices(Part):
    """The simulated machine."""

    name: str
    description: str = ""
    kind: str = Field("gpu", pattern=r"^[a-z]+$", description="Devices are called kind:0, kind:1, …")
    actor: int = Field(ge=1, le=4096, description="Devices of the actor; its decoding and training use all of them.")
    groups: dict[str, Annotated[int, Field(ge=1, le=4096)]] = Field(
        default_factory=dict, description="Further groups of devices by name, each with a process of its own."
    )
    place: dict[ReadingRole, str] = Field(description="Which group each scorer lives on; `actor` is the actor's own.")
    without_streaming: Literal["keep", "share"] = Field(
        "keep", description="With `overlap.intra_step: off`: scorers keep their devices, or every stage uses all devices."
    )
    padded: bool = Field(False, description="Finished rows go on decoding as padding, and passes are padded to the longest row.")
    contention: float = Field(1.0, ge=1, description="How much slower a process is for each other one that works meanwhile.")
    ranks: Ranks | None = Field(
        None, description="Every device is a data-parallel rank. Without it rows are divided evenly and nothing is communicated."
    )
    costs: Costs
    overheads: Overheads = Overheads()
    workload: Workload = Workload()

    @model_validator(mode="after")
    def everyone_has_a_place(self) -> Self:
        """Every scorer is on an existing group, and every group has a scorer."""
        if ACTOR_GROUP in self.groups:
            raise ValueError(f"groups: {ACTOR_GROUP!r} is the actor's own group; its size is the field `actor`")
        for role in READING_ROLES:
            if self.place.get(role) not in (ACTOR_GROUP, *self.groups):
                raise ValueError(f"place.{role} must be one of {', '.join((ACTOR_GROUP, *self.groups))}")
        unused = sorted(set(self.groups) - set(self.place.values()))
        if unused:
            raise ValueError(f"groups.{unused[0]} has no scorer; name it in `place` or leave it out")
        return self

    @property
    def names(self) -> list[str]:
        """All devices, the actor's first."""
        return [f"{self.kind}:{number}" for number in range(self.actor + sum(self.groups.values()))]

    def group(self, name: str) -> tuple[str, ...]:
        """Devices of a group."""
        if name == ACTOR_GROUP:
            return tuple(self.names[: self.actor])
        before = self.actor
        for other, count in self.groups.items():
            if other == name:
                return tuple(self.names[before : before + count])
            before += count
        raise KeyError(name)

    def ranks_of(self, count: int) -> int:
        """Data-parallel ranks of a group of `count` devices."""
        return 1 if self.ranks is None else count

    def collectives_us(self, count: int, size: float, calls: int = 1) -> float:
        """See `Ranks.collectives_us`."""
        return 0.0 if self.ranks is None else self.ranks.collectives_us(count, size, calls)

    def decode_us(self, count: int, rounds: int, rows: int, tokens: float) -> float:
        """Decode steps on `count` devices over `rows` rows with `tokens` cached tokens in all, one more per row and step."""
        costs = self.costs.decode
        attended = rounds * tokens + rows * rounds * (rounds - 1) / 2
        shared = rounds * rows * costs.row_us + attended * costs.cached_token_us
        return rounds * costs.round_us + shared / speed(count, costs.parallel)

    def passes_us(self, count: int, costs: Reading, token_us: float, lengths: Sequence[int], pass_tokens: int) -> float:
        """Passes on `count` devices over rows of `lengths` tokens at `token_us` per token, at most `pass_tokens` per pass."""
        tokens = self.tokens(lengths)
        return self.passes(lengths, pass_tokens) * costs.pass_us + tokens * token_us / speed(count, costs.parallel)

    def passes(self, lengths: Sequence[int], pass_tokens: int) -> int:
        """Number of passes over rows of `lengths` tokens, at most `pass_tokens` per pass."""
        return -(-self.tokens(lengths) // pass_tokens)

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of rows of these lengths, including padding if the devices pad."""
        return len(lengths) * max(lengths, default=0) if self.padded else sum(lengths)


def speed(devices: int, parallel: float) -> float:
    """Speed of `devices` devices relative to one."""
    return 1 + (devices - 1) * parallel


def builtin_names() -> list[str]:
    """Names of the built-in descriptions."""
    folder = files("oppo_estimate") / "machines"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_devices(name: str) -> Devices:
    """A built-in description by name, or one from a file.

    Raises:
        DevicesError: neither exists, or the description is invalid; the message lists every problem.
    """
    if name in builtin_names():
        text = (files("oppo_estimate") / "machines" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            known = ", ".join(builtin_names())
            raise DevicesError(f"{name} is neither a readable file nor one of the built-in devices: {known}") from None
    try:
        return Devices.model_validate(parse_yaml(text))
    except SpecError as error:
        raise DevicesError(f"{name}: " + "; ".join(str(problem) for problem in error.problems)) from None
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'the description'}: {e['msg']}" for e in error.errors()]
        raise DevicesError(f"{name}:\n" + "\n".join(f"  {line}" for line in lines)) from None
