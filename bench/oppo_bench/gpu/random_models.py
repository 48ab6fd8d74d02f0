"""Networks with random weights, built once per size on the device; weights are written to disk for vLLM only.

Reward and reference share one frozen backbone. All variants train the same actor and critic: lengths are fixed, so no variant's
work depends on the weights, and several variants fit into memory.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oppo_bench.engine.models import EOS, PAD, write_tokenizer
from oppo_bench.engine.workload import CONTEXT, Load, Size
from oppo_bench.gpu.cases import ADAPTED, UNTIED
from oppo_core.models import model_io as folders
from oppo_core.models.adapters import inject_lora
from oppo_core.models.attention import FUSED
from oppo_core.models.fused_modules import fuse_modules
from oppo_core.models.huggingface import HuggingFaceNetwork

ROLES = ("actor", "reward", "reference", "critic")
NAME = "load_model"


class ModelSet:
    """The four roles' networks of one size. `folder` gets a tokenizer and a config per role, which the engine reads."""

    def __init__(self, load: Load, folder: Path, device: torch.device) -> None:
        from transformers import AutoConfig

        self.folder, self.device = folder, device
        self._shared = load.name in ADAPTED
        self.config = AutoConfig.for_model("qwen2", **described(load.size, load.name in UNTIED))
        for role in ROLES:
            (folder / role).mkdir(parents=True)
            write_tokenizer(folder / role)
            self.config.save_pretrained(folder / role)
        base = random_model(self.config, getattr(torch, load.size.dtype), device, load.lengths.seed)
        self.networks: dict[str, HuggingFaceNetwork] = {
            "reference": HuggingFaceNetwork(base, None), "reward": _scalar(base.model, 1),
            "actor": HuggingFaceNetwork(self._copy(base), None), "critic": _scalar(self._copy(base.model), 2),
        }  # fmt: skip
        self._adapted: set[str] = set()

    def _copy(self, model: nn.Module) -> Any:
        """A copy of a module; with adapters over the same tensors, which stay frozen."""
        tensors = [*model.parameters(), *model.buffers()] if self._shared else []
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})

    def models(self) -> dict[str, Any]:
        """The `models` section of a spec."""
        paths = {role: {"path": str(self.folder / role)} for role in ROLES}
        named: dict[str, Any] = {**paths, "reward": {"model": paths["reward"]}}
        return named | ({"lora": {"rank": 16}} if self._shared else {})

    def write_weights(self) -> None:
        """Write the actor's weights beside its tokenizer, for vLLM, which reads a folder."""
        self.networks["actor"].model.save_pretrained(self.folder / "actor")

    def load_model(
        self, spec: Any, head: str, roots: Any, dtype: Any, seed: int, lora: Any = None, device: Any = None, sharded: bool = False
    ) -> Any:
        """Replaces the engine's own function: returns the role's existing network."""
        role = Path(spec.path).name
        if lora is not None and role not in self._adapted:
            inject_lora(self.networks[role], lora, seed)
            self.networks[role].to(self.device)
            self._adapted.add(role)
        return self.networks[role]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within the block the engine's parts get their networks here."""
        own = folders.load_model
        users = [m for name, m in list(sys.modules.items()) if name.startswith("oppo_core") and getattr(m, NAME, None) is own]
        try:
            for module in users:
                setattr(module, NAME, self.load_model)
            yield
        finally:
            for module in users:
                setattr(module, NAME, own)


def described(size: Size, untied: bool) -> dict[str, Any]:
    """A size as transformers' configuration of Qwen2."""
    return {
        "hidden_size": size.hidden, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads, "intermediate_size": size.inner, "vocab_size": size.vocab,
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": not untied, "num_labels": 1,
        "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS,
    }  # fmt: skip


def random_model(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A causal language model, as the engine's own loader returns one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.set_attn_implementation(FUSED)
    fuse_modules(model)
    return model.eval()


def _scalar(backbone: Any, seed: int) -> HuggingFaceNetwork:
    """A backbone with a scalar head."""
    weight = next(backbone.parameters())
    head = nn.Linear(backbone.config.hidden_size, 1).to(weight)
    drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed)) / backbone.config.hidden_size**0.5
    with torch.no_grad():
        head.weight.copy_(drawn)
        head.bias.zero_()
    return HuggingFaceNetwork(backbone, head)
