"""Cost and saving of the options for an update's memory: `python bench/update_memory.py [--json FILE]`

Trains one actor on one batch of answers with fixed, long-tailed lengths, under `training.recompute` off, head, selective
and full, padded and packed, in passes of at most `--budget` tokens. The options take turns, round by round, so that other load on
the machine affects all of them. Time is processor time of a whole update of the actor: proximal log-probs, loss, gradients,
optimizer step. Bytes are counted: the most that tensors of the passes held at one time, gradients included, weights and
optimizer state not.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from oppo_bench.engine.threads import thread_settings, wait_as_the_engine_does

wait_as_the_engine_does()

import torch  # noqa: E402

from oppo_bench.document import Result, document, write  # noqa: E402
from oppo_bench.engine.memory_options import Update, measured, table, to_results  # noqa: E402
from oppo_bench.engine.workload import CONTEXT, LONGEST, SIZES, Lengths, Size  # noqa: E402
from oppo_bench.machine_load import LoadMonitor  # noqa: E402
from oppo_contract.spec import TinyArchitecture  # noqa: E402
from oppo_core.models.protocol import Network  # noqa: E402
from oppo_core.models.tiny_transformer import init_tiny  # noqa: E402

# M and L are those of `oppo bench engine`; Q has the proportions of a published model with a large vocabulary.
RACED = {"M": SIZES["M"], "Q": Size(256, 4, 8, 2, 1408, 32768, "qwen2"), "L": SIZES["L"]}


def random_network(size: Size) -> Network:
    """Random weights in the shape of `size`."""
    if size.model_type == "oppo_tiny":
        shape = {"hidden": size.hidden, "layers": size.layers, "heads": size.heads, "context": CONTEXT, "vocab": size.vocab}
        return init_tiny(TinyArchitecture.model_validate(shape), "lm", 0).eval()
    from transformers import AutoConfig

    from oppo_bench.gpu.random_models import described, random_model
    from oppo_core.models.huggingface import HuggingFaceNetwork

    config = AutoConfig.for_model(size.model_type, **described(size, False))
    return HuggingFaceNetwork(random_model(config, getattr(torch, size.dtype), torch.device("cpu"), 0), None)


def main() -> None:
    """Measure, print the tables, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--sizes", default="M,Q", help=f"comma-separated, of {', '.join(RACED)}")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--budget", type=int, default=2048, help="most tokens of a pass, padding included (ppo.micro_batch_tokens)"
    )
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest answer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    monitor, results = LoadMonitor(), list[Result]()
    lengths = Lengths(seed=1, longest=options.longest)
    for name in options.sizes.split(","):
        size, case = RACED[name], f"{name}/B{options.batch}"
        update = Update(random_network(size), options.batch, lengths, options.budget)
        found = to_results(case, measured(update, options.repetitions))
        results += found
        print(
            f"\n{case}: {size.model_type}, hidden {size.hidden}, {size.layers} layers, vocabulary {size.vocab:,}, {size.dtype};"
            f" {update.tokens:,} tokens, passes of at most {update.trainer.ppo.micro_batch_tokens:,};"
            f" {options.repetitions} repetitions in turns, {options.threads} threads, processor time"
        )
        print("\n".join(table(case, found)))
    machine = monitor.machine()
    print(f"\n{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, load {machine.load:.2f} before, others used"
          f" {machine.other_cores if machine.other_cores is None else round(machine.other_cores, 2)} cores")  # fmt: skip
    if options.json:
        settings = {"threads": options.threads, "seed": 1, "settings": thread_settings(), "repetitions": options.repetitions}
        write(options.json, document("update_memory", machine, settings, results))
