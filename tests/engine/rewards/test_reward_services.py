"""Reward services: what is asked, what is believed, what is tried again, and that nothing waits for ever."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oppo_contract.spec import HttpReward
from oppo_core.rewards import http_request as requests
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.service import ServiceReward
from oppo_core.rewards.service_auth import HOSTS_VARIABLE, allowed_places, allowed_url, bearer_token
from oppo_core.rollout.tokenizer import ByteCodec
from tests.engine.rewards.reward_server import Judge, Told, judging, scored, worth

CODEC = ByteCodec(300)
PATIENCE_S = 60.0
Ask = Callable[..., ServiceReward]


def answer_of(number: int, prompt: str = "", response: str = "") -> Answer:
    """A finished answer with a text of its own."""
    text = response or " ".join(f"w{place * number % 5}" for place in range(number + 2))
    ids = [i for i in CODEC.encode(text) if i != 1] + ([CODEC.eos] if number % 2 else [])
    return Answer(number, CODEC.encode(prompt or f"prompt {number % 3}"), ids, CODEC)


ANSWERS = [answer_of(number) for number in range(7)]
HONEST = [worth({"response": answer.response, "ended": answer.ended}) for answer in ANSWERS]


def nothing() -> None:
    """No sign of life is asked for."""


@pytest.fixture
def judge() -> Iterator[Judge]:
    with judging() as listening:
        yield listening


@pytest.fixture
def ask(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Makes a `ServiceReward` that asks the judge, with short pauses; closed in the end."""
    monkeypatch.setenv(HOSTS_VARIABLE, judge.place)
    monkeypatch.setattr(requests, "FIRST_PAUSE_S", 0.001)
    made: list[ServiceReward] = []

    def make(lines: PromptRecords | None = None, **settings: Any) -> ServiceReward:
        made.append(ServiceReward(HttpReward(url=judge.url, **settings), 3, lines))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def scores_of(reward: ServiceReward, answers: list[Answer]) -> list[float]:
    """Start them and wait."""
    reward.start(answers, nothing)
    ids = [answer.sequence_id for answer in answers]
    assert reward.wait(ids, PATIENCE_S)
    return [reward.score(i) for i in ids]


def failure(reward: ServiceReward) -> str:
    """What the reward says when it gives up."""
    reward.start(ANSWERS[:2], nothing)
    with pytest.raises(RewardError) as caught:
        reward.wait([0, 1], PATIENCE_S)
    with pytest.raises(RewardError):  # and it stays so
        reward.start(ANSWERS[2:], nothing)
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_each_answer_gets_its_own_score(judge: Judge, ask: Ask, size: int) -> None:
    assert scores_of(ask(answers_a_request=size), ANSWERS) == HONEST
    told = sorted((answer for asked in judge.asked for answer in asked["answers"]), key=lambda answer: int(answer["id"]))
    assert [len(asked["answers"]) for asked in judge.asked].count(size) == len(ANSWERS) // size
    assert {asked["version"] for asked in judge.asked} == {1}
    assert told == [
        {"id": str(a.sequence_id), "prompt": a.prompt, "response": a.response, "ended": a.sequence_id % 2 == 1} for a in ANSWERS
    ]
    assert all("authorization" not in headers for headers in judge.headers)


def test_the_prompts_line_and_the_token_are_sent_when_asked_for(
    judge: Judge, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPPO_REWARD_JUDGE", "s3cret")
    rows = [{"prompt": f"prompt {number}", "answer": number * 7} for number in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = PromptRecords()
    lines.read(tmp_path / "p.jsonl", "prompt", CODEC, 100)
    scores_of(ask(lines, token_variable="OPPO_REWARD_JUDGE", send_line=True), ANSWERS[:3])
    assert [answer["line"] for asked in judge.asked for answer in asked["answers"]] == rows
    assert judge.headers[0]["authorization"] == "Bearer s3cret"


def body(scores: object) -> bytes:
    return json.dumps({"scores": scores}).encode()


PASSING: dict[str, tuple[Told, str]] = {
    "500": (Told(500, b"boom"), "HTTP 500, it answered 'boom'"),
    "429": (Told(429, b"", {"retry-after": "0"}), "HTTP 429"),
    "garbage": (Told(body=b"\xff<html>"), "no JSON"),
    "a list": (Told(body=b"[1.0, 2.0]"), 'not {"scores"'),
    "too few": (Told(body=body([1.0])), "1 scores for 2 answers"),
    "NaN": (Told(body=body([1.0, float("nan")])), "scores[1] is nan"),
    "infinite": (Told(body=b'{"scores": [1e999, 0]}'), "scores[0] is inf"),
    "text": (Told(body=body(["1", 2.0])), "scores[0] is a str"),
    "a truth value": (Told(body=body([True, 2.0])), "scores[0] is a bool"),
    "endless": (Told(body=b'{"scores": [' + b" " * 20_000), "the reply has more than"),
    "compressed": (Told(body=body([1.0, 2.0]), headers={"content-encoding": "gzip"}), "compressed"),
    "shorter than promised": (Told(body=b"{}", headers={"content-length": "50", "connection": "close"}), "complete message body"),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_costs_a_try_and_nothing_else(judge: Judge, ask: Ask, name: str) -> None:
    bad, _ = PASSING[name]
    judge.behave = lambda asked, number: bad if number <= 4 else scored(asked)
    assert scores_of(ask(attempts=3), ANSWERS[:2]) == HONEST[:2]
    assert len(judge.asked) == 5


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_lasts_opens_the_breaker_and_is_told(judge: Judge, ask: Ask, name: str) -> None:
    bad, words = PASSING[name]
    judge.behave = lambda asked, number: bad
    message = failure(ask(attempts=2, break_after=2, timeout_s=PATIENCE_S))
    assert message.startswith(f"the reward service {judge.place} failed: 2 requests in a row failed, 2 attempts each")
    assert words in message
    assert len(judge.asked) == 4


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (Told(404, b"no such page"), "no such page"),
        (Told(401, b"who is s3cret?"), "who is [token]?"),
        (Told(302, b"", {"location": "http://elsewhere/"}), "redirects are not followed"),
    ],
    ids=["404", "401", "302"],
)
def test_what_asking_again_cannot_change_ends_the_run_at_once(
    judge: Judge, ask: Ask, monkeypatch: pytest.MonkeyPatch, told: Told, words: str
) -> None:
    monkeypatch.setenv("OPPO_REWARD_JUDGE", "s3cret")
    judge.behave = lambda asked, number: told
    message = failure(ask(token_variable="OPPO_REWARD_JUDGE"))
    assert words in message
    assert "s3cret" not in message
    assert len(judge.asked) == 1


def test_a_service_that_hangs_is_given_up(judge: Judge, ask: Ask) -> None:
    def hang(asked: Any, number: int) -> Told:
        judge.hold()
        return scored(asked)

    judge.behave = hang
    assert "no reply within 0.2 s" in failure(ask(timeout_s=0.2, attempts=2, break_after=1))


def test_a_service_that_drips_is_given_up(judge: Judge, ask: Ask) -> None:
    """Each byte comes in time, the reply as a whole does not."""
    judge.behave = lambda asked, number: Told(body=body([1.0] * 2), slowly=0.15)
    assert "no reply within 0.4 s" in failure(ask(timeout_s=0.4, attempts=1, break_after=1))


def test_nobody_listens(judge: Judge, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and never listening
        place = f"127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setenv(HOSTS_VARIABLE, place)
        reward = ServiceReward(HttpReward(url=f"http://{place}", attempts=2, break_after=1), 0, None)
        try:
            assert "ConnectError" in failure(reward)
        finally:
            reward.close()


def test_one_request_that_always_fails_ends_the_run_though_others_succeed(judge: Judge, ask: Ask) -> None:
    judge.behave = lambda asked, number: Told(503) if asked["answers"][0]["id"] == "1" else scored(asked)
    reward = ask(answers_a_request=1, attempts=1, break_after=4)
    reward.start(ANSWERS, nothing)
    with pytest.raises(RewardError, match="requests in a row failed"):
        reward.wait([0, 1], PATIENCE_S)


def test_a_slow_service_is_waited_for_and_asked_no_more_at_once_than_allowed(judge: Judge, ask: Ask) -> None:
    at_once, most, lock = [0], [0], threading.Lock()
    full = threading.Event()

    def slow(asked: Any, number: int) -> Told:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            if at_once[0] == 3:
                full.set()
        full.wait(PATIENCE_S)
        with lock:
            at_once[0] -= 1
        return scored(asked)

    judge.behave = slow
    assert scores_of(ask(answers_a_request=1, requests_at_once=3), ANSWERS) == HONEST
    assert most[0] == 3


def test_a_reply_for_an_answer_that_was_dropped_meanwhile_is_not_taken(judge: Judge, ask: Ask) -> None:
    """The same sequence_id may come again with other tokens: a reply belongs to the request that was made for it."""

    def behave(asked: Any, number: int) -> Told:
        if number == 1:
            judge.hold()
            return Told(body=body([111.0]))
        return Told(body=body([222.0]))

    judge.behave = behave
    reward = ask()
    reward.start([ANSWERS[0]], nothing)
    assert not reward.wait([0], 0.05)
    reward.forget(0)
    assert scores_of(reward, [answer_of(0, response="another one")]) == [222.0]
    judge.released.set()
    assert scores_of(reward, [ANSWERS[1]]) == [222.0]
    assert reward.score(0) == 222.0


def test_closing_ends_the_thread_though_a_request_is_under_way(judge: Judge, ask: Ask) -> None:
    def hang(asked: Any, number: int) -> Told:
        judge.hold()
        return scored(asked)

    judge.behave = hang
    reward = ask()
    reward.start(ANSWERS, nothing)
    reward.close()
    assert not reward._thread.is_alive()


@pytest.mark.parametrize(
    ("url", "allowed", "words"),
    [
        ("http://127.0.0.1:9/x", None, "OPPO_REWARD_HOSTS=127.0.0.1:9"),
        ("http://127.0.0.1:9/x", "127.0.0.1:8", "is not allowed"),
        ("http://127.0.0.1:9/x", "127.0.0.1", "is not allowed"),
        ("http://judge.example.org.evil.example/x", "judge.example.org", "is not allowed"),
        ("http://me:pass@127.0.0.1:9/x", "127.0.0.1:9", "holds a user or password"),
        ("http://127.0.0.1:9/x", "127.0.0.1:9, http://[", "no host or host:port"),
        ("http:///x", "127.0.0.1:9", "must be http://host"),
    ],
)
def test_no_service_is_asked_that_the_worker_does_not_allow(url: str, allowed: str | None, words: str) -> None:
    environment = {} if allowed is None else {HOSTS_VARIABLE: allowed}
    with pytest.raises(RewardError) as caught:
        allowed_url(url, environment)
    assert words in str(caught.value)


def test_a_list_of_allowed_services() -> None:
    listed = {HOSTS_VARIABLE: "a.example, b.example:8443 [::1]:80"}
    assert allowed_places(listed) == {"a.example:80", "a.example:443", "b.example:8443", "::1:80"}
    for url in ("http://a.example/x", "https://A.example", "https://b.example:8443/y", "http://[::1]"):
        assert str(allowed_url(url, listed))


@pytest.mark.parametrize(
    ("value", "words"), [(None, "is not set"), ("", "is not set"), ("a b", "no token has"), ("ü", "no token")]
)
def test_a_token_that_is_none(value: str | None, words: str) -> None:
    http = HttpReward(url="http://a.example", token_variable="OPPO_REWARD_X")
    with pytest.raises(RewardError, match=words):
        bearer_token(http, {} if value is None else {"OPPO_REWARD_X": value})


def test_the_list_of_hosts_is_no_token() -> None:
    http = HttpReward(url="http://a.example", token_variable=HOSTS_VARIABLE)
    with pytest.raises(RewardError, match="must start with"):
        bearer_token(http, {HOSTS_VARIABLE: "a.example"})
