"""`LogLine` and `Sample`, parsed from the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from oppo_client.html import cell, escaped

EXCERPT = 70


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line of an engine or its supervisor; `attempt` counts from 1. The text is untrusted."""

    id: int
    attempt: int
    stream: str
    text: str
    time: datetime

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded response. Its texts are untrusted.

    Attributes:
        prompt: the prompt; of a chat prompt the last user turn.
        messages: all turns of a chat prompt, `{"role": …, "content": …}` each; None for a plain prompt, and with `excerpt`.
        stale_response: prefix of the response that was sampled under older weights; empty with `excerpt`.
        score: reward. `kl`: nats, against the reference. `length`: tokens. `age`: steps of deferral.
        versions: policy versions of the first and last token.
        held_out: whether it belongs to an evaluation.
        ending: `eos`, `stop`, `length`, or None if unknown.
        raw: the API's object, including unknown keys of newer platforms.
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
    messages: list[dict[str, str]] | None = field(repr=False)
    versions: tuple[int, int] = field(repr=False)
    stale_response: str = field(repr=False)
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        prompt, response = (_truncate(text) for text in (self.prompt, self.response))
        return f"<Sample {self.id} step={self.step} score={cell(self.score)} age={self.age} {prompt!r} → {response!r}>"

    def _repr_html_(self) -> str:
        stale = escaped(self.stale_response) if self.response.startswith(self.stale_response) else ""
        fresh = escaped(self.response[len(self.stale_response) :] if stale else self.response)
        head = f"step {self.step} · score {cell(self.score)} · KL {cell(self.kl)} · {self.length} tokens"
        if self.age:
            head += f" · staleness {self.age} step{'s' if self.age > 1 else ''}"
        stale_html = f'<span style="opacity:.55" title="sampled under an older policy version">{stale}</span>' if stale else ""
        text = '<div style="white-space:pre-wrap;margin-top:.3em">'
        return (
            f'<div style="border-left:3px solid #888;padding-left:.7em;margin:.5em 0"><small>{escaped(head)}</small>'
            f"{self._prompt_html(text)}{text}{stale_html}{fresh}</div></div>"
        )

    def _prompt_html(self, opening: str) -> str:
        if self.messages is None:
            return f"{opening}<b>{escaped(self.prompt)}</b></div>"
        turns = ((escaped(turn["role"]), escaped(turn["content"])) for turn in self.messages)
        return "".join(f"{opening}<small>{role}</small><br><b>{content}</b></div>" for role, content in turns)


def check_filters(method: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raises `TypeError` for a filter of samples that the method does not have."""
    if unknown := given.keys() - known:
        names, filters = (", ".join(sorted(names)) for names in (unknown, known))
        raise TypeError(f"{method}() has no filter {names}; filters are {filters}")


def parse_log_line(row: Mapping[str, Any]) -> LogLine:
    """A line of `GET runs/{id}/logs`."""
    time = datetime.fromisoformat(row["time"])
    return LogLine(int(row["id"]), int(row["attempt"]), str(row["stream"]), str(row["text"]), time)


def parse_sample(row: Mapping[str, Any]) -> Sample:
    """An item of `GET runs/{id}/samples`, or of a prompt of `GET compare/samples`."""
    first, last = row["versions"]
    return Sample(
        id=row["id"],
        step=row["step"],
        prompt=row["prompt"],
        response=row["response"],
        score=row["score"],
        kl=row["kl"],
        length=row["length"],
        age=row["age"],
        ending=row.get("ending"),
        held_out=bool(row.get("held_out")),
        prompt_key=row["prompt_key"],
        messages=row.get("messages"),
        versions=(first, last),
        stale_response=row.get("stale_response") or "",
        raw=dict(row),
    )


def _truncate(text: str) -> str:
    return text if len(text) <= EXCERPT else text[: EXCERPT - 1] + "…"
