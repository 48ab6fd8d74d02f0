"""FSDP2: every role is sharded over two and three processes, and learns what one process with whole weights does."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from oppo_core.models.activation_checkpointing import transformer_blocks
from oppo_core.models.tensor_files import shards_of_rank
from oppo_core.models.tiny_transformer import init_tiny
from oppo_core.rewards.service_auth import HOSTS_VARIABLE
from tests.backends.test_trainer_contract import (
    ARCHITECTURE,
    BACKENDS,
    Runs,
    Tree,
    assert_alike,
    case,
    close,
    merged,
    train_cases,
)
from tests.engine.rewards.reward_server import serve_rewards

STEPS = 6
DEFER: Tree = {
    "steps": STEPS, "checkpoints": {"every_steps": STEPS // 2, "keep": 3}, "resources": {"dtype": "float64"},
    "overlap": {"intra_step": "per_chunk", "inter_step": "defer", "overcommit": {"initial": 2, "min": 0, "max": 4}},
    "ppo": {"mini_batches": 2, "epochs": 2},
    "evaluation": {"prompts": "prompts.jsonl", "every_steps": 2, "count": 5},
}  # fmt: skip
GROUPS: Tree = {
    "ppo": {"algorithm": "grpo", "group_size": 2, "batch_size": 4, "dynamic_sampling": 2, "critic_learning_rate": None},
    "models": {"critic": "actor"},
}
HALF = f"checkpoints/step-{STEPS // 2:08d}"
SHORT_CHUNKS: Tree = merged(DEFER, {"overlap": {"chunk": {"size": 3}}})
STOPS = (2, 7, 12)  # chunks of unfinished steps, since the start of the run
TAIL: Tree = {"overlap": {"inter_step": "tail_batch"}}
WAYS = {"defer": DEFER, "groups": merged(DEFER, GROUPS), "tail": merged(DEFER, TAIL)}


def listed(reward_url: str) -> list[dict[str, object]]:
    """All runs; those that resume come after what they resume."""
    # Both parts are of the rank that decoded a response: one is streamed, the other read when the batch is complete.
    parts = [{"weight": 1.0, "http": {"url": reward_url}}, {"weight": 0.5, "model": {"path": "reward"}}]
    served = {"models": {"reward": {"parts": parts, "model": None}, "critic": {"path": "reward"}}}
    ways = WAYS | {"http": merged(DEFER, served)}
    plain, sharded = BACKENDS["plain"], BACKENDS["fsdp2"]
    runs = [case(f"{way}-1", plain, changes, nodes=1, read=way == "defer") for way, changes in ways.items()]
    runs += [
        case(f"{way}-{ranks}", sharded, changes, nodes=ranks, read=way == "defer")
        for way, changes in ways.items()
        for ranks in (2, 3)
    ]
    runs += [case(f"{a}-then-{b}", sharded, DEFER, nodes=b, resume=f"defer-{a}/{HALF}") for a, b in ((2, 3), (3, 2))]
    runs.append(case("3-then-1", plain, DEFER, nodes=1, resume=f"defer-3/{HALF}"))
    runs += [case(f"stopped-{stop}", sharded, SHORT_CHUNKS, nodes=2, stop=stop) for stop in STOPS]
    return [*runs, *(case(f"stopped-{stop}-then-3", sharded, DEFER, nodes=3, resume=f"stopped-{stop}") for stop in STOPS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with serve_rewards() as server:
        world = tmp_path_factory.mktemp("sharded")
        return train_cases(world, listed(server.url), 3, **{HOSTS_VARIABLE: server.place})


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", [*WAYS, "http"])
def test_sharded_roles_learn_what_one_process_does(runs: Runs, way: str, ranks: int) -> None:
    """Rows are balanced among the ranks after they were decoded, also where a service has scored them by then (`http`)."""
    for rank in range(ranks):
        found = runs.result(f"{way}-{ranks}", rank)["steps"]
        assert len(found) == STEPS
        assert [close(1e-9)(step) for step in runs.result(f"{way}-1")["steps"]] == found
    assert_alike(runs, f"{way}-{ranks}", f"{way}-1", 1e-9, range(ranks))
    received = sum(runs.result(f"{way}-{ranks}", rank)["received"] for rank in range(ranks))
    assert bool(received) == (way == "http"), "rows whose scores the rank that decoded them has"


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pass_without_gradients_equals_that_of_whole_weights_and_gathers_two_units_at_most(
    runs: Runs, ranks: int, role: str
) -> None:
    """The units of our own architecture: each block, and the rest."""
    network = init_tiny(ARCHITECTURE, "lm" if role == "actor" else "scalar", 0)
    whole, block = (sum(weight.numel() for weight in part.parameters()) for part in (network, transformer_blocks(network)[0]))
    units = sorted([block] * ARCHITECTURE.layers + [whole - ARCHITECTURE.layers * block])
    for rank in range(ranks):
        read = runs.result(f"defer-{ranks}", rank)["read"][role]
        assert read["result"] == pytest.approx(runs.result("defer-1")["read"][role]["result"], rel=1e-9, abs=1e-9)
        assert read["own"] < 8 * 1.1 * whole / ranks
        assert read["own"] < read["most"] <= read["own"] + 8 * sum(units[-2:])


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_saves_its_shards(runs: Runs, ranks: int) -> None:
    """Of the critic and of both optimizers; only step counts are saved whole."""
    folder = runs.world / f"defer-{ranks}" / HALF
    sizes = [sum(file.stat().st_size for file in shards_of_rank(folder, rank)) for rank in range(ranks)]
    assert max(sizes) < 1.1 * sum(sizes) / ranks
    for role in ("actor-optimizer", "critic", "critic-optimizer"):
        with safe_open(folder / f"{role}.safetensors", "pt") as whole:
            assert all(name.endswith(".step") for name in whole.keys()), role  # noqa: SIM118
        assert len(list((folder / f"{role}.shards").iterdir())) == ranks


@pytest.mark.parametrize(("name", "ranks"), [("2-then-3", 3), ("3-then-2", 2), ("3-then-1", 1)])
def test_another_number_of_ranks_resumes_with_the_same_result(runs: Runs, name: str, ranks: int) -> None:
    for rank in range(ranks):
        expected = runs.result("defer-1")["steps"][STEPS // 2 :]
        assert [close(1e-9)(step) for step in expected] == runs.result(name, rank)["steps"]
    assert_alike(runs, name, "defer-1", 1e-9, range(ranks))


@pytest.mark.parametrize("stop", STOPS)
def test_a_run_that_was_stopped_within_a_streamed_step_is_resumed_with_the_same_result(runs: Runs, stop: int) -> None:
    """Scores and prefixes that were streamed to the sharded scorers are streamed again, to other ranks."""
    (newest,) = sorted((runs.world / f"stopped-{stop}" / "checkpoints").iterdir())[-1:]
    assert "-chunk-" in newest.name
    for rank in range(3):
        resumed = runs.result(f"stopped-{stop}-then-3", rank)["steps"]
        expected = runs.result("defer-1")["steps"]
        assert [close(1e-9)(step) for step in expected[len(expected) - len(resumed) :]] == resumed
    assert_alike(runs, f"stopped-{stop}-then-3", "defer-1", 1e-9, range(3))
