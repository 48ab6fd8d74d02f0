"""Hypothesis strategies for valid specs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAME = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._ -]{0,59}[A-Za-z0-9._-])?", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40)
# Words that YAML readers like to take for something else.
TRICKY = st.sampled_from(
    ["off", "yes", "null", "~", "1e-5", "0x10", "2020-01-01", "1:30", "- a", "a: b", "#", " x ", "'", '"', "[", "é", "@a"]
)
PATHS = TEXT | TRICKY
SMALL = st.floats(1e-9, 1.0)

NAMES = ["llama3/8b lr=1e-5 β", 'größe: #3 + "x"', "🚀", "- [x] 'y' {z}", "null", "1e3", "<b>", "%s", "海"]


def _some(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


@st.composite
def _tiny(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    return {"hidden": heads * 8 * draw(st.integers(1, 8)), "heads": heads, "layers": draw(st.integers(1, 64)), "context": 131072}


PACKING = {"packing": st.sampled_from(["off", "on"])}
RECOMPUTE = {"recompute": st.sampled_from(["off", "head", "selective", "full"])}
TRAINING = st.fixed_dictionaries(
    {"backend": st.sampled_from(["plain", "fsdp2"])}, optional=RECOMPUTE | PACKING
) | st.fixed_dictionaries(
    {"backend": st.just("deepspeed"), "zero_stage": st.sampled_from([1, 2])},
    optional=RECOMPUTE | PACKING | {"offload": st.sampled_from(["off", "optimizer"])},
)
MODELS = st.fixed_dictionaries({"path": PATHS}) | st.fixed_dictionaries({"tiny": _tiny()})


@st.composite
def _roles(draw: st.DrawFn) -> dict[str, Any]:
    rule = {"rule": "oppo_core.rules:length"}
    served = {"served_by": st.just("vllm"), "memory_share": st.floats(0.01, 0.5)}
    reward = draw(
        st.just(rule)
        | st.fixed_dictionaries({"model": MODELS})
        | st.fixed_dictionaries({"model": st.fixed_dictionaries({"path": PATHS}), **served})
    )
    starts = ["actor"] if "rule" in reward else ["actor", "reward"]
    roles = {"actor": draw(MODELS), "reward": reward, "critic": draw(st.sampled_from(starts) | MODELS)}
    return roles | draw(_some(reference=st.none() | MODELS))


@st.composite
def _resources(draw: st.DrawFn, sequences: int) -> dict[str, Any]:
    """At most as many ranks as `sequences`."""
    ranks = draw(st.integers(1, min(sequences, 256)))
    a_node = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    nodes = ranks // a_node
    on_gpus = {"nodes": nodes, "devices": ranks, "kind": "cuda", "processes": draw(st.sampled_from([None, a_node]))}
    on_cpus = {"nodes": nodes, "devices": nodes, "kind": "cpu", "processes": a_node}
    return draw(st.sampled_from([{}, on_gpus, on_cpus]))


@st.composite
def _decoded(draw: st.DrawFn, spec: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM decoding where valid, with or without GPUs of its own."""
    resources = spec["resources"]
    if "path" not in spec["models"]["actor"] or resources.get("kind") == "cpu" or not draw(st.booleans()):
        return spec
    spec["rollout"] = {"backend": "vllm"}
    spec["ppo"]["tis"] = "all"
    if resources:
        ranks = resources["devices"] // resources["nodes"]
        together = spec["training"]["backend"] != "plain" and ranks * resources["nodes"] > 1
        resources["decoding_devices"] = ranks * draw(st.integers(1 if together else 0, 2))
        resources["devices"] += resources["nodes"] * resources["decoding_devices"]
    return spec


@st.composite
def _scored_aside(draw: st.DrawFn, spec: dict[str, Any]) -> dict[str, Any]:
    """The same with a GPU for each rank's scorers where valid."""
    resources = spec["resources"]
    if resources.get("kind") == "cuda" and spec["training"]["backend"] == "plain" and draw(st.booleans()):
        resources["scoring_devices"] = resources["devices"] // resources["nodes"] - resources.get("decoding_devices", 0)
        resources["devices"] += resources["nodes"] * resources["scoring_devices"]
    return spec


@st.composite
def valid_specs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid spec as plain data, as YAML or JSON would give it."""
    mini_batches = draw(st.integers(1, 8))
    batch_size = mini_batches * draw(st.integers(1, 32))
    low, start, high = sorted(draw(st.lists(st.integers(0, batch_size), min_size=3, max_size=3)))
    algorithm = draw(st.sampled_from(["ppo", "ppo", "grpo", "rloo"]))
    of_critic = {"value_clip_range": st.none() | SMALL, "gamma": st.floats(0, 1), "critic_learning_rate": SMALL}
    ppo = _some(
        **of_critic if algorithm == "ppo" else {}, learning_rate=SMALL,
        tis=st.sampled_from(["off", "stale", "all"]), whiten_advantages=st.booleans(),
        kl=_some(coefficient=st.floats(0, 100), estimator=st.sampled_from(["k1", "k2", "k3"])),
    )  # fmt: skip
    grouped = {} if algorithm == "ppo" else {"algorithm": algorithm, "group_size": draw(st.integers(2, 64))}
    roles = draw(_roles())
    if algorithm != "ppo":
        roles["critic"] = "actor"
    overlap = _some(
        intra_step=st.sampled_from(["off", "per_chunk"]), inter_step=st.sampled_from(["off", "defer", "tail_batch"]),
        max_age=st.integers(1, 1000),
        chunk=_some(size=st.integers(1, 65536), candidates=st.none() | st.lists(st.integers(1, 512), min_size=2, max_size=5)),
    )  # fmt: skip
    spec = {
        "name": draw(NAME | st.sampled_from(NAMES)),
        "steps": draw(st.integers(1, 10_000_000)),
        "models": roles,
        "data": {"prompts": draw(PATHS), "shuffle": draw(st.booleans())},
        "ppo": {"batch_size": batch_size, "mini_batches": mini_batches} | grouped | draw(ppo),
        "training": draw(TRAINING),
        "resources": draw(_resources(batch_size)),
        "overlap": {"overcommit": {"min": low, "initial": start, "max": high}} | draw(overlap),
        "budget": draw(_some(max_hours=st.none() | SMALL, target_reward=st.none() | st.floats(-1e6, 1e6))),
    }
    if roles["reward"].get("served_by") == "vllm" and spec["resources"].get("kind") == "cpu":
        spec["resources"] = {}
    return draw(_scored_aside(draw(_decoded(spec))))
