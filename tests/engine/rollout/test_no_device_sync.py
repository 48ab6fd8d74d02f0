"""Decoding, prefill and gradients never synchronize with the device: they run on torch's `meta` device.

Tensors on `meta` have shapes but no data. Reading one, branching on one, or mixing it with host tensors raises there; on a GPU it
would synchronize and break CUDA graph capture.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from oppo_contract.spec import ModelSpec, Ppo, Training
from oppo_core.models.incremental_prefill import IncrementalPrefill
from oppo_core.models.model_io import load_model
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.deferred_metrics import DeferredMetrics, TokenSums
from oppo_core.ppo.experience import build_experience
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.device_decoder import DeviceDecoder
from oppo_core.rollout.sequence import Sequence
from oppo_core.training.optimizer import Optimizer
from tests.engine.models.architectures import ARCHITECTURES, write_folders

SETTINGS = DecodeSettings(3, 2, 0.9, 12, 20, 400)
KEPT = ["plain", "head", "packed"]
QUICK = {"qwen2"}
MODELS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in sorted(ARCHITECTURES)]


@pytest.fixture(scope="module", params=MODELS)
def nowhere(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    """A model of each architecture on the `meta` device."""
    folder: Path = write_folders(request.param, tmp_path_factory.mktemp(request.param))
    network = load_model(ModelSpec(path="actor"), "lm", [folder], torch.bfloat16, 0)
    return network.to("meta")


@torch.no_grad()
def test_decode_rounds_do_not_synchronize(nowhere: Network) -> None:
    decoder = DeviceDecoder(nowhere, SETTINGS, 6)
    assert decoder.begin([Sequence(n, 0, np.arange(3, 6 + n)) for n in range(3)]) == 9
    for columns in (16, 24):
        decoder._advance_rows(4, columns)


def test_incremental_prefill_does_not_synchronize(nowhere: Network) -> None:
    stream = IncrementalPrefill(nowhere, 4, 24, PassBudget(64))
    read = stream.read({0: np.arange(3, 8), 1: np.arange(3, 12), 2: np.arange(3, 9)}, {2})
    assert [len(read[n].hidden) for n in range(3)] == [5, 9, 6]
    read = stream.read({0: np.arange(3, 15), 1: np.arange(3, 13)}, {0})
    assert [len(read[n].hidden) for n in range(2)] == [8, 2]


@pytest.mark.parametrize(
    "training", [Training(), Training(recompute="head"), Training(packing="on")], ids=["plain", "head", "packed"]
)
def test_gradients_do_not_synchronize(nowhere: Network, monkeypatch: pytest.MonkeyPatch, training: Training) -> None:
    """Deferred metrics are read after all passes are launched; here not at all."""
    if training.packs and nowhere.refuses_packing:
        pytest.skip(nowhere.refuses_packing)
    monkeypatch.setattr(DeferredMetrics, "read", lambda figures: [])
    lengths, ppo = [2, 5, 3], Ppo(batch_size=3, micro_batch_tokens=20)
    answers = [
        Sequence(n, 0, np.arange(3, 6 + n), [5] * length, [-1.0] * length, [0] * length) for n, length in enumerate(lengths)
    ]
    rows = [np.zeros(length) for length in lengths]
    scored = [Scored(float(n), row, row) for n, row in enumerate(rows)]
    experience = build_experience(answers, [torch.from_numpy(row) for row in rows], scored, ppo, 0.1, 0, ScoreMoments())
    actor = ActorTrainer(copy.deepcopy(nowhere), ppo, 0.9, 0, 1, training=training)
    assert isinstance(actor.optimizer, Optimizer)
    masters = actor.optimizer.masters
    actor.accumulate(experience, [0, 1, 2], 0.1, 10, TokenSums(), 0)
    assert all(weight.grad is not None for weight in masters)
