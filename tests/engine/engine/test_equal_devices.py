"""All ranks of a run train on devices of one kind."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch

from oppo_core.distributed.process_group import Ranks
from oppo_core.engine import layout
from oppo_core.engine.layout import LayoutError, require_equal_devices
from tests.fakes.thread_ranks import on_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["H100 (80 GiB)", "A100 (80 GiB)"], "rank 0 has H100 (80 GiB), rank 1 has A100 (80 GiB)"),
        (["H100 (80 GiB)", "no GPU", "H100 (80 GiB)"], "rank 1 has no GPU"),
    ],
)
def test_ranks_on_different_devices_are_refused_on_every_rank(names: list[str], words: str) -> None:
    here: dict[int, str] = {}

    def join(ranks: Ranks) -> str:
        here[threading.get_ident()] = names[ranks.rank]
        with pytest.raises(LayoutError) as refused:
            require_equal_devices(CPU, ranks)
        return str(refused.value)

    def name_here(device: torch.device) -> str:
        return here[threading.get_ident()]

    with mock.patch.object(layout, "_device_name", name_here):
        reasons = on_threads(len(names), join)
    assert all(words in reason and "resources.kind" in reason for reason in reasons)


def test_ranks_on_equal_devices_are_accepted() -> None:
    on_threads(2, lambda ranks: require_equal_devices(CPU, ranks))
