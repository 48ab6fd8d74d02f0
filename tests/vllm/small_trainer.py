"""A trainer's process over vLLM, for tests that send it signals: `python -m tests.vllm.small_trainer ACTOR_FOLDER`.

Prints the engine's process id and folder, then decodes two answers for every line of stdin and prints how many finished.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from oppo_contract.sections.models import Lora
from oppo_core.models.model_io import load_model
from oppo_core.vllm.build import build_decoder
from tests.vllm.test_vllm_engine import CPU, SETTINGS, sequences, spec_for, to_the_end


def main(folder: Path) -> None:
    """Start the engine, then follow stdin."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # as the engine's command line: the run ends after its chunk
    spec = spec_for(folder, lora=Lora(rank=3))
    network: Any = load_model(spec.models.actor, "lm", [], torch.float32, 0, spec.models.lora)
    decoder = build_decoder(spec, folder, network, SETTINGS, None, 4, CPU)
    children = psutil.Process().children()
    (engine,) = (child.pid for child in children if child.name().startswith("VLLM"))
    print("engine:", engine, os.environ["VLLM_RPC_BASE_PATH"], flush=True)  # vLLM prints lines, too
    for version, _ in enumerate(iter(sys.stdin.readline, "")):
        some = sequences(2)
        decoder.begin(some, version)
        to_the_end(decoder, version)
        print("finished:", sum(s.finished for s in some), flush=True)
    decoder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
