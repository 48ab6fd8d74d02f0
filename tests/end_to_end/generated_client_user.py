"""A user of the client that test_generated_client.py generates; prints what it has read as JSON. `program.py URL < token`"""

import json
import sys

from oppo_platform_client import AuthenticatedClient
from oppo_platform_client.api.runs import download_spec, list_runs, show_logs, show_metrics, show_run, submit_run, validate_spec
from oppo_platform_client.models import (
    Data,
    Models,
    ModelsCriticType0,
    ModelSpec,
    Ppo,
    RewardSpec,
    Rollout,
    RunSpec,
    SpecBody,
    TinyArchitecture,
)

REWARD = "critic/score/mean"
ENDED = ("succeeded", "failed", "cancelled")


def spec(steps: int) -> RunSpec:
    """A run of a second or two."""
    tiny = TinyArchitecture(hidden=16, layers=1, heads=2, context=64, vocab=259)
    return RunSpec(
        name="by a generated client",
        steps=steps,
        models=Models(actor=ModelSpec(tiny=tiny), critic=ModelsCriticType0.ACTOR, reward=RewardSpec(rule="letters:score")),
        data=Data(prompts="tiny/prompts.jsonl"),
        ppo=Ppo(batch_size=8, learning_rate=1e-3),
        rollout=Rollout(max_new_tokens=32, max_prompt_tokens=16),
    )


def main() -> None:
    """Submit, watch, read."""
    client = AuthenticatedClient(base_url=sys.argv[1], token=sys.stdin.read().strip(), raise_on_unexpected_status=True)
    refused = validate_spec.sync(client=client, body=SpecBody(spec=spec(0)))
    submitted = submit_run.sync(client=client, body=SpecBody(spec=spec(12)))
    states: list[str] = []
    streamed = 0
    with client.get_httpx_client().stream("GET", "/api/v1/stream", params={"runs": str(submitted.id)}, timeout=180) as events:
        for line in events.iter_lines():
            if line.startswith("data:"):
                streamed += 1
                states.append(json.loads(line.removeprefix("data:"))["state"])
                if states[-1] in ENDED:
                    break
    run = show_run.sync(submitted.id, client=client)
    metrics = show_metrics.sync(submitted.id, client=client, keys=REWARD)
    listed = list_runs.sync(client=client, limit=1)
    logs = show_logs.sync(submitted.id, client=client, limit=5)
    found = {
        "states": states, "streamed": streamed, "refused": [problem.path for problem in refused.problems],
        "steps": metrics.series.additional_properties[REWARD].step,
        "state": run.state, "listed": [each.id for each in listed.items],
        "id": submitted.id, "log_lines": len(logs.lines), "spec": download_spec.sync(submitted.id, client=client),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
