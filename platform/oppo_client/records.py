"""What comes in lists: answers, log lines, checkpoints' facts. Unknown keys of newer platforms are kept in `raw`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from oppo_client.html import cell, escaped

EXCERPT = 70


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that an engine or its supervisor wrote; `attempt` counts from 1. The text is untrusted."""

    id: int
    attempt: int
    stream: str
    text: str
    time: datetime

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded answer. Texts are what users and models wrote.

    Attributes:
        stale_response: the head of the response that was sampled under older weights; empty with `excerpt`.
        score: reward. `kl`: nats, against the reference. `length`: tokens. `age`: steps for which it was deferred.
        versions: of the policy that its first and last token were sampled under.
        held_out: whether it is an evaluation's answer.
        ending: `eos`, `stop`, `length`, or None where it is not known.
        raw: everything that was told.
    """

    id: int
    step: int
    prompt: str
    response: str
    score: float | None
    kl: float | None
    length: int
    age: int
    ending: str | None
    held_out: bool
    prompt_key: str
    versions: tuple[int, int] = field(repr=False)
    stale_response: str = field(repr=False)
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        prompt, response = (_short(text) for text in (self.prompt, self.response))
        return f"<Sample {self.id} step={self.step} score={cell(self.score)} age={self.age} {prompt!r} → {response!r}>"

    def _repr_html_(self) -> str:
        stale = escaped(self.stale_response) if self.response.startswith(self.stale_response) else ""
        fresh = escaped(self.response[len(self.stale_response) :] if stale else self.response)
        head = f"step {self.step} · score {cell(self.score)} · KL {cell(self.kl)} · {self.length} tokens"
        if self.age:
            head += f" · staleness {self.age} step{'s' if self.age > 1 else ''}"
        older = f'<span style="opacity:.55" title="sampled under an older policy version">{stale}</span>' if stale else ""
        text = '<div style="white-space:pre-wrap;margin-top:.3em">'
        return (
            f'<div style="border-left:3px solid #888;padding-left:.7em;margin:.5em 0"><small>{escaped(head)}</small>'
            f"{text}<b>{escaped(self.prompt)}</b></div>{text}{older}{fresh}</div></div>"
        )


def log_line(told: Mapping[str, Any]) -> LogLine:
    """A line of `GET runs/{id}/logs`."""
    time = datetime.fromisoformat(told["time"])
    return LogLine(int(told["id"]), int(told["attempt"]), str(told["stream"]), str(told["text"]), time)


def sample_of(told: Mapping[str, Any]) -> Sample:
    """An item of `GET runs/{id}/samples`."""
    first, last = told["versions"]
    return Sample(
        id=told["id"],
        step=told["step"],
        prompt=told["prompt"],
        response=told["response"],
        score=told["score"],
        kl=told["kl"],
        length=told["length"],
        age=told["age"],
        ending=told.get("ending"),
        held_out=bool(told.get("held_out")),
        prompt_key=told["prompt_key"],
        versions=(first, last),
        stale_response=told.get("stale_response") or "",
        raw=dict(told),
    )


def _short(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"
