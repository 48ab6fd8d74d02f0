"""Spec sections of data, evaluation, resources, queue, retries, budget, checkpoints and logging."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from oppo_contract.fields import ALLOWED
from oppo_contract.sections.base import Path, Section
from oppo_contract.sections.trackers import Trackers
from oppo_contract.spec_errors import SettingError

DEFAULT_PRIORITY = 50
MAX_PATIENCE = 100


ColumnName = Annotated[str, Field(min_length=1, max_length=120)]


class PromptSource(Section):
    """Files of prompts."""

    prompts: Path | Annotated[list[Path], Field(min_length=1, max_length=1024)] = Field(
        description="Id from a worker's catalogue or a local file, a folder of files, or a list of these: JSON Lines, Parquet"
        " or Arrow (IPC, Feather), all of one format. Each record is an object with a prompt.",
    )
    prompt_field: str = Field(
        "prompt",
        min_length=1,
        max_length=120,
        description="Key of the prompt in each record: text, or a list of {role, content} messages for the chat template.",
    )
    columns: dict[ColumnName, ColumnName] | None = Field(
        None,
        min_length=1,
        max_length=100,
        json_schema_extra={ALLOWED: "a mapping of 1 to 100 new keys to old ones"},
        description="New names of keys, `new: old`, such as `{prompt: question}`, before `prompt_field` and rewards read them.",
    )

    @property
    def paths(self) -> list[str]:
        """`prompts` as a list."""
        return [self.prompts] if isinstance(self.prompts, str) else self.prompts


class Data(PromptSource):
    """The prompts."""

    shuffle: bool = Field(True, description="Shuffle the prompts every epoch, seeded by `seed`.")


class Evaluation(PromptSource):
    """Evaluation on held-out prompts during training."""

    every_steps: int = Field(50, ge=1, description="Steps between two evaluations; the first is before step 1.")
    count: int = Field(64, ge=1, le=65536, description="Prompts per evaluation, from the start of the files.")
    greedy: bool = Field(False, description="Greedy decoding, or sampling as in training with separate random numbers.")


class Fork(Section):
    """The checkpoint of another run to start from. Platform only: the engine gets the checkpoint's folder."""

    run: int = Field(ge=1, le=2**63 - 1, description="Id of a run of the same team.")
    step: int = Field(ge=0, le=2**31 - 1, description="Step of its checkpoint; step numbers continue from there.")


class Resources(Section):
    """Devices, nodes, ranks and precision."""

    devices: int = Field(
        1,
        ge=1,
        le=4096,
        description="Total devices of the run: GPUs, or one cpu device per node with all of its cores.",
    )
    nodes: int = Field(1, ge=1, le=512, description="Number of nodes. Devices are divided evenly among them.")
    processes: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Data-parallel ranks (processes) per node; empty: one per device. A GPU has exactly one rank, so"
        " other numbers need `kind` cpu, where ranks share the node's cores.",
    )
    decoding_devices: int = Field(
        0,
        ge=0,
        le=4096,
        description="Devices per node reserved for vLLM decoding (`rollout.backend: vllm`), the same number for each"
        " rank; the other devices train.",
    )
    scoring_devices: int = Field(
        0,
        ge=0,
        le=4096,
        description="Devices per node for reward models, reference and critic, one for each rank; 0: they share"
        " the actor's devices.",
    )
    kind: Literal["any", "cpu", "cuda"] = Field("any", description="Device kind.")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32", description="Precision of weights and computation. With bfloat16 the optimizer updates float32 copies."
    )
    longest_silence_s: float = Field(
        600.0, ge=1, le=86400, description="Seconds without a heartbeat after which a process of the run counts as hung."
    )
    cpu_threads: int | None = Field(None, ge=1, le=1024, description="CPU cores for the engine; empty: all cores of the node.")

    @model_validator(mode="after")
    def check_devices_per_node(self) -> Self:
        if self.devices % self.nodes:
            raise SettingError(
                "devices",
                f"is the total of the run and cannot be divided evenly among {self.nodes} nodes",
                value=self.devices,
                allowed=f"{self.nodes}, or another multiple of it",
            )
        return self

    @model_validator(mode="after")
    def check_device_roles(self) -> Self:
        each, training = self.devices // self.nodes, self._training_devices
        if self.decoding_devices >= each:
            raise SettingError(
                "decoding_devices",
                f"leaves none of the {each} devices per node (resources.devices) to train",
                value=self.decoding_devices,
                allowed=f"at most {each - 1}, or more devices",
            )
        if self.scoring_devices not in (0, training):
            half, odd = divmod(each - self.decoding_devices, 2)
            raise SettingError(
                "scoring_devices",
                f"leaves {max(0, training)} of the {each} devices per node (resources.devices) to actors, and each actor"
                " needs one device for its scorers",
                value=self.scoring_devices,
                allowed="0, or an even number of devices that do not decode" if odd else f"0 or {half}",
            )
        if self.decoding_devices % training:
            raise SettingError(
                "decoding_devices",
                f"cannot be divided among the {training} ranks on the other devices of a node",
                value=self.decoding_devices,
                allowed=f"a multiple of {training}",
            )
        return self

    @model_validator(mode="after")
    def check_processes(self) -> Self:
        each = self._training_devices
        if self.kind == "cpu" and self.devices > self.nodes:
            raise SettingError(
                "devices",
                "is more than one cpu device per node; a cpu device is the whole node",
                value=self.devices,
                allowed=f"{self.nodes}; resources.processes divides a node's cores among several ranks",
            )
        if self.kind != "cpu" and self.processes not in (None, each):
            raise SettingError(
                "processes",
                f"is not {each}, the training devices per node (resources.devices); a GPU has exactly one rank",
                value=self.processes,
                allowed=f"{each}, or empty, or kind cpu",
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        """Data-parallel ranks per node."""
        return self.processes or self._training_devices

    @property
    def _training_devices(self) -> int:
        """Devices per node on which an actor is trained."""
        return self.devices // self.nodes - self.decoding_devices - self.scoring_devices

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the run."""
        return self.nodes * self.ranks_per_node


class Queue(Section):
    """Queueing and maximum runtime. Platform only."""

    priority: int = Field(DEFAULT_PRIORITY, ge=1, le=99, description="Priority within the team; higher runs first.")
    preemptible: bool = Field(True, description="May be preempted with a checkpoint; keeps its place in the queue.")
    max_runtime_hours: float | None = Field(
        None,
        gt=0,
        le=87600,
        description="Max runtime on devices, after which the run is paused with a checkpoint; can be extended. Enables backfill.",
    )


class LogRule(Section):
    """Action for a failure whose log contains a text. The text is not a regular expression, so matching is always fast."""

    match: str = Field(
        min_length=1,
        max_length=200,
        description="Text in the engine's last log lines or its error; case is ignored, * matches anything.",
    )
    action: Literal["fail", "exclude_node", "retry"] = Field(
        description="Fail immediately; retry on other nodes only; or retry even if the engine reports a final error."
    )


class Retries(Section):
    """Retries after a failure. Preemption, pauses and worker shutdowns are not failures."""

    attempts: int | None = Field(
        None, ge=1, le=100, description="Failed attempts after which the run fails; empty: the platform's limit."
    )
    backoff_s: float = Field(
        5.0,
        ge=0,
        le=86400,
        description="Wait after the engine's first failure, seconds; doubles after each further one, up to an hour.",
    )
    rules: list[LogRule] = Field(
        default_factory=lambda: [
            LogRule(match="out of memory", action="fail"),
            LogRule(match="ECC", action="exclude_node"),
        ],
        max_length=20,
        description="Rules on the engine's last log lines; the first match decides.",
    )


class Budget(Section):
    """Stop conditions and the target reward."""

    max_hours: float | None = Field(None, gt=0, description="End the run with a checkpoint after this many hours of training.")
    target_reward: float | None = Field(None, description="Target reward, shown in charts and used for time-to-target.")
    stop_at_target: bool = Field(
        False, description="End the run when the mean score (of the evaluation, where there is one) reaches `target_reward`."
    )
    max_kl: float | None = Field(
        None,
        gt=0,
        description="End the run when a step's mean KL to the reference exceeds this, nats per sequence.",
    )
    min_entropy: float | None = Field(
        None, gt=0, description="End the run when a step's mean policy entropy (`actor/entropy`) is below this, nats per token."
    )
    max_repetition: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="End the run when a step's mean share of repeated 4-grams (`response/repetition`) exceeds this.",
    )
    patience: int = Field(
        1,
        ge=1,
        le=MAX_PATIENCE,
        description="Consecutive steps beyond `max_kl`, `min_entropy` or `max_repetition` after which the run ends.",
    )


class Checkpoints(Section):
    """Checkpoint interval and retention."""

    every_steps: int = Field(100, ge=1, description="Steps between two checkpoints; the last step always writes one.")
    keep: int = Field(2, ge=1, description="Latest checkpoints to keep.")
    keep_best: int = Field(
        0,
        ge=0,
        le=100,
        description="Best checkpoints to keep in addition, by evaluation score, otherwise by mean score.",
    )


class Logging(Section):
    """Samples, timelines and external trackers."""

    samples_per_step: int = Field(2, ge=0, le=64, description="Responses recorded as text per step.")
    spans_every: int = Field(1, ge=1, description="Record the timeline every n steps.")
    trackers: Trackers = Field(default_factory=Trackers, description="External experiment trackers.")
