"""Reward services: what is asked, what is believed, what is tried again, and that nothing waits for ever."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oppo_contract.spec import HttpReward
from oppo_core.rewards import http_request as requests
from oppo_core.rewards.allowed_hosts import parse_allowed_hosts
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.service import ServiceReward
from oppo_core.rewards.service_auth import HOSTS_VARIABLE, allowed_url, bearer_token
from oppo_core.rollout.tokenizer import ByteCodec
from tests.engine.rewards.reward_server import Response, RewardServer, expected_score, score_response

CODEC = ByteCodec(300)
PATIENCE_S = 60.0
Ask = Callable[..., ServiceReward]


def answer_of(number: int, prompt: str = "", response: str = "") -> Answer:
    """A finished answer with a text of its own."""
    text = response or " ".join(f"w{place * number % 5}" for place in range(number + 2))
    ids = [i for i in CODEC.encode(text) if i != 1] + ([CODEC.eos] if number % 2 else [])
    return Answer(number, CODEC.encode(prompt or f"prompt {number % 3}"), ids, CODEC)


ANSWERS = [answer_of(number) for number in range(7)]
HONEST = [expected_score({"response": answer.response, "ended": answer.ended}) for answer in ANSWERS]


def nothing() -> None:
    """No sign of life is asked for."""


@pytest.fixture
def ask(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Makes a `ServiceReward` that asks the judge, with short pauses; closed in the end."""
    monkeypatch.setattr(requests, "FIRST_PAUSE_S", 0.001)
    made: list[ServiceReward] = []

    def make(lines: PromptRecords | None = None, **settings: Any) -> ServiceReward:
        made.append(ServiceReward(HttpReward(url=server.url, **settings), 3, lines))
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
def test_each_answer_gets_its_own_score(server: RewardServer, ask: Ask, size: int) -> None:
    assert scores_of(ask(answers_a_request=size), ANSWERS) == HONEST
    told = sorted((answer for asked in server.asked for answer in asked["answers"]), key=lambda answer: int(answer["id"]))
    assert [len(asked["answers"]) for asked in server.asked].count(size) == len(ANSWERS) // size
    assert {asked["version"] for asked in server.asked} == {1}
    assert told == [
        {"id": str(a.sequence_id), "prompt": a.prompt, "response": a.response, "ended": a.sequence_id % 2 == 1} for a in ANSWERS
    ]
    assert all("authorization" not in headers for headers in server.headers)


def test_the_turns_of_a_conversation_are_sent(server: RewardServer, ask: Ask) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add two"}]
    scores_of(ask(), [replace(ANSWERS[0], messages=talk), ANSWERS[1]])
    (told, plain) = [answer for asked in server.asked for answer in asked["answers"]]
    assert (told["prompt"], told["messages"]) == ("add two", talk)
    assert "messages" not in plain


def test_prompt_record_and_token_are_sent(
    server: RewardServer, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPPO_REWARD_JUDGE", "s3cret")
    rows = [{"prompt": f"prompt {number}", "answer": number * 7} for number in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = PromptRecords()
    lines.read(tmp_path / "p.jsonl", "prompt", CODEC, 100)
    scores_of(ask(lines, token_variable="OPPO_REWARD_JUDGE", send_line=True), ANSWERS[:3])
    assert [answer["line"] for asked in server.asked for answer in asked["answers"]] == rows
    assert server.headers[0]["authorization"] == "Bearer s3cret"


def body(scores: object) -> bytes:
    return json.dumps({"scores": scores}).encode()


PASSING: dict[str, tuple[Response, str]] = {
    "500": (Response(500, b"boom"), "HTTP 500, response 'boom'"),
    "429": (Response(429, b"", {"retry-after": "0"}), "HTTP 429"),
    "garbage": (Response(body=b"\xff<html>"), "not JSON"),
    "a list": (Response(body=b"[1.0, 2.0]"), 'not {"scores"'),
    "too few": (Response(body=body([1.0])), "1 scores for 2 answers"),
    "NaN": (Response(body=body([1.0, float("nan")])), "scores[1] is nan"),
    "infinite": (Response(body=b'{"scores": [1e999, 0]}'), "scores[0] is inf"),
    "text": (Response(body=body(["1", 2.0])), "scores[0] is a str"),
    "a truth value": (Response(body=body([True, 2.0])), "scores[0] is a bool"),
    "endless": (Response(body=b'{"scores": [' + b" " * 20_000), "the response has more than"),
    "compressed": (Response(body=body([1.0, 2.0]), headers={"content-encoding": "gzip"}), "compressed"),
    "shorter than promised": (
        Response(body=b"{}", headers={"content-length": "50", "connection": "close"}),
        "complete message body",
    ),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_temporary_fault_costs_attempts_only(server: RewardServer, ask: Ask, name: str) -> None:
    bad, _ = PASSING[name]
    server.behave = lambda asked, number: bad if number <= 4 else score_response(asked)
    assert scores_of(ask(attempts=3), ANSWERS[:2]) == HONEST[:2]
    assert len(server.asked) == 5


@pytest.mark.parametrize("name", PASSING)
def test_a_permanent_fault_opens_the_circuit_breaker(server: RewardServer, ask: Ask, name: str) -> None:
    bad, words = PASSING[name]
    server.behave = lambda asked, number: bad
    message = failure(ask(attempts=2, break_after=2, timeout_s=PATIENCE_S))
    assert message.startswith(f"the reward service {server.place} failed: 2 requests in a row failed, 2 attempts each")
    assert words in message
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (Response(404, b"no such page"), "no such page"),
        (Response(401, b"who is s3cret?"), "who is [token]?"),
        (Response(302, b"", {"location": "http://elsewhere/"}), "redirects are not followed"),
    ],
    ids=["404", "401", "302"],
)
def test_final_errors_are_not_retried(
    server: RewardServer, ask: Ask, monkeypatch: pytest.MonkeyPatch, told: Response, words: str
) -> None:
    monkeypatch.setenv("OPPO_REWARD_JUDGE", "s3cret")
    server.behave = lambda asked, number: told
    message = failure(ask(token_variable="OPPO_REWARD_JUDGE"))
    assert words in message
    assert "s3cret" not in message
    assert len(server.asked) == 1


def test_a_hanging_service_times_out(server: RewardServer, ask: Ask) -> None:
    def hang(asked: Any, number: int) -> Response:
        server.hold()
        return score_response(asked)

    server.behave = hang
    assert "no response within 0.2 s" in failure(ask(timeout_s=0.2, attempts=2, break_after=1))


def test_a_slowly_sent_response_times_out(server: RewardServer, ask: Ask) -> None:
    """Each byte comes in time, the reply as a whole does not."""
    server.behave = lambda asked, number: Response(body=body([1.0] * 2), slowly=0.15)
    assert "no response within 0.4 s" in failure(ask(timeout_s=0.4, attempts=1, break_after=1))


def test_connection_refused(server: RewardServer, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and never listening
        place = f"127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setenv(HOSTS_VARIABLE, place)
        reward = ServiceReward(HttpReward(url=f"http://{place}", attempts=2, break_after=1), 0, None)
        try:
            assert "ConnectError" in failure(reward)
        finally:
            reward.close()


def test_one_permanently_failing_request_opens_the_breaker(server: RewardServer, ask: Ask) -> None:
    server.behave = lambda asked, number: Response(503) if asked["answers"][0]["id"] == "1" else score_response(asked)
    reward = ask(answers_a_request=1, attempts=1, break_after=4)
    reward.start(ANSWERS, nothing)
    with pytest.raises(RewardError, match="requests in a row failed"):
        reward.wait([0, 1], PATIENCE_S)


def test_concurrent_requests_are_limited(server: RewardServer, ask: Ask) -> None:
    at_once, most, lock = [0], [0], threading.Lock()
    full = threading.Event()

    def slow(asked: Any, number: int) -> Response:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            if at_once[0] == 3:
                full.set()
        full.wait(PATIENCE_S)
        with lock:
            at_once[0] -= 1
        return score_response(asked)

    server.behave = slow
    assert scores_of(ask(answers_a_request=1, requests_at_once=3), ANSWERS) == HONEST
    assert most[0] == 3


def test_a_response_for_a_forgotten_answer_is_ignored(server: RewardServer, ask: Ask) -> None:
    """The same sequence_id may come again with other tokens: a reply belongs to the request that was made for it."""

    def behave(asked: Any, number: int) -> Response:
        if number == 1:
            server.hold()
            return Response(body=body([111.0]))
        return Response(body=body([222.0]))

    server.behave = behave
    reward = ask()
    reward.start([ANSWERS[0]], nothing)
    assert not reward.wait([0], 0.05)
    reward.forget(0)
    assert scores_of(reward, [answer_of(0, response="another one")]) == [222.0]
    server.released.set()
    assert scores_of(reward, [ANSWERS[1]]) == [222.0]
    assert reward.score(0) == 222.0


def test_close_cancels_a_request_in_flight(server: RewardServer, ask: Ask) -> None:
    def hang(asked: Any, number: int) -> Response:
        server.hold()
        return score_response(asked)

    server.behave = hang
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
        ("http://me:pass@127.0.0.1:9/x", "127.0.0.1:9", "contains a user or password"),
        ("http://127.0.0.1:9/x", "127.0.0.1:9, http://[", "not host or host:port"),
        ("http:///x", "127.0.0.1:9", "must be http://host"),
    ],
)
def test_services_outside_the_allow_list_are_refused(url: str, allowed: str | None, words: str) -> None:
    environment = {} if allowed is None else {HOSTS_VARIABLE: allowed}
    with pytest.raises(RewardError) as caught:
        allowed_url(url, environment)
    assert words in str(caught.value)


def test_allowed_hosts() -> None:
    listed = {HOSTS_VARIABLE: "a.example, b.example:8443 [::1]:80"}
    assert parse_allowed_hosts(HOSTS_VARIABLE, listed) == {"a.example:80", "a.example:443", "b.example:8443", "::1:80"}
    for url in ("http://a.example/x", "https://A.example", "https://b.example:8443/y", "http://[::1]"):
        assert str(allowed_url(url, listed))


@pytest.mark.parametrize(("value", "words"), [(None, "is not set"), ("", "is not set"), ("a b", "not valid"), ("ü", "not valid")])
def test_invalid_tokens(value: str | None, words: str) -> None:
    http = HttpReward(url="http://a.example", token_variable="OPPO_REWARD_X")
    with pytest.raises(RewardError, match=words):
        bearer_token(http, {} if value is None else {"OPPO_REWARD_X": value})


def test_the_host_list_is_not_a_token() -> None:
    http = HttpReward(url="http://a.example", token_variable=HOSTS_VARIABLE)
    with pytest.raises(RewardError, match="must start with"):
        bearer_token(http, {HOSTS_VARIABLE: "a.example"})
