"""The table of 8 and 64 GPUs: its machine follows from what it cites, and its cases are those that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oppo_core.simulation import scale
from oppo_core.simulation.paper import Case, simulate_case
from oppo_core.simulation.sensitivity import KERNELS_US
from oppo_estimate.devices import Devices, load_devices
from oppo_estimate.schedules import Row

PARAMETERS = 7.62e9


def rows_of(name: str, steps: int) -> dict[str, Row]:
    """Rows of a case of the table."""
    (case,) = (case for case in scale.table_cases() if case.name == name)
    return simulate_case(case, steps)


def test_the_machine_follows_from_what_it_cites() -> None:
    devices, paper = load_devices(scale.MACHINE), load_devices("paper-h200-7b")
    costs = devices.costs
    for role in ("actor", "reward", "reference", "critic"):
        own, cited = getattr(costs, role), getattr(paper.costs, role)
        assert (own.pass_us, own.token_us) == (cited.pass_us, cited.token_us)
        assert own.gathered_bytes == pytest.approx(2 * PARAMETERS), "bfloat16"
        assert own.units == 28 + 2
    for trained in (costs.actor, costs.critic):
        assert trained.trained_bytes == pytest.approx(4 * PARAMETERS), "float32"
        assert trained.backward_us == paper.costs.actor.backward_us
    assert (costs.decode.row_us, costs.decode.cached_token_us) == (paper.costs.decode.row_us, paper.costs.decode.cached_token_us)
    assert costs.decode.round_us == KERNELS_US
    assert devices.ranks is not None
    assert 240e9 <= devices.ranks.node_bytes_s <= 265e9  # type: ignore[operator]
    assert 42e9 <= devices.ranks.network_bytes_s <= 193e9  # type: ignore[operator]


def test_the_table_has_every_number_of_gpus_with_every_batch_and_response_length() -> None:
    cases = scale.table_cases()
    assert len({case.name for case in cases}) == 2 * 3 * 3
    for case in cases:
        assert case.name == scale.name(len(case.devices.names), case.spec.ppo.batch_size, case.spec.rollout.max_new_tokens)
        assert Devices.model_validate(case.devices.model_dump()) == case.devices
        assert case.devices.actor == 7 * case.devices.groups["reward"]
        assert case.spec.training.shards_weights
        assert case.spec.models.reward.is_remote, "a sharded reward would not be streamed"
        assert case.devices.workload.lengths.median * 8 == case.spec.rollout.max_new_tokens  # type: ignore[union-attr]
        assert case.spec.overlap.overcommit.initial * 4 == case.spec.ppo.batch_size
        assert case.spec.ppo.batch_size in scale.STEPS


def test_every_assumption_changes_the_machine_alone() -> None:
    cases = scale.sensitivity_cases()
    assert len({case.name for case in cases}) == len(cases) == 2 * len(scale.CHANGES)
    for gpus in scale.GPUS:
        base, *changed = (case for case in cases if case.name.startswith(f"{gpus} GPUs: "))
        assert base.devices == scale.gpu_machine(gpus, scale.SENSITIVE_LONGEST)
        assert all(case.devices != base.devices and case.spec == base.spec for case in changed)


def test_deferral_gains_more_on_more_gpus_and_streaming_to_a_reward_alone_gains_little() -> None:
    few, many = (rows_of(scale.name(gpus, 112, 512), 5) for gpus in scale.GPUS)
    for rows in (few, many):
        assert rows["sequential"].speedup == pytest.approx(1)
        assert rows["inter"].speedup > 1.3
        assert 0.9 < rows["intra"].speedup < 1.1
        assert all(0 <= row.skew < 1 - row.utilization + 1e-9 for row in rows.values())
        assert rows["inter"].skew < rows["sequential"].skew, "deferral removes the tail, in which most ranks wait"
    assert many["inter"].speedup > few["inter"].speedup + 0.1
    assert many["sequential"].decode_share > few["sequential"].decode_share


def test_slow_links_cost_time_and_no_links_none() -> None:
    (base,) = (case for case in scale.table_cases() if case.name == scale.name(64, 112, 512))
    changes = dict(scale.CHANGES)
    steps = {
        name: simulate_case(Case(name, base.spec, change(base.devices) if change else base.devices), 4)["sequential"].step_s
        for name, change in changes.items()
        if name in ("no communication", "links 4 × as fast", "as assumed", "links ÷ 4", "links ÷ 16", "a collective takes 1 ms")
    }
    assert steps["no communication"] < steps["links 4 × as fast"] < steps["as assumed"] < steps["links ÷ 4"] < steps["links ÷ 16"]
    assert steps["as assumed"] < steps["a collective takes 1 ms"]


@pytest.mark.full
def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With one cell and one assumption of the many; the rest only takes longer."""
    from oppo_cli.simulate import simulate

    monkeypatch.setattr(scale, "GPUS", (8,))
    monkeypatch.setattr(scale, "BATCHES", (112,))
    monkeypatch.setattr(scale, "LONGEST", (512,))
    monkeypatch.setattr(scale, "CHANGES", scale.CHANGES[1:2])
    monkeypatch.setattr(scale, "SENSITIVE_BATCH", 112)
    file = tmp_path / "scale.json"
    printed = CliRunner().invoke(simulate, ["--scale", "--steps", "3", "--json", str(file)], catch_exceptions=False)
    assert printed.exit_code == 0, printed.output
    for text in ("8 GPUs, B 112, to 512", "8 GPUs: decode step 29 ms", "skew", "Δ B ÷ 4"):
        assert text in printed.output
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert document["simulate"] == "scale"
    (rows,) = document["table"].values()
    assert [row["schedule"] for row in rows] == ["sequential", "intra", "inter", "both"]
