"""Bad input is refused with a clear message before anything is queued; good input is queued as it is."""

import pytest

from oppo_contract.spec import MAX_SPEC_BYTES, load_spec
from oppo_platform.runs.models import Run
from oppo_platform.runs.services import node_offers
from oppo_platform.scheduling.cycle import run_cycle
from oppo_platform.usecases.check_spec import chosen_values

TINY = {"tiny": {"context": 1024}}


@pytest.fixture
def browser(world):
    return world.login("ada")


def send(browser, **body):
    return browser.post("/api/v1/runs", body, content_type="application/json")


def complaint(browser, **body):
    """The only complaint about a body; nothing was queued."""
    reply = send(browser, **body)
    assert reply.status_code == 422, reply.content
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert not Run.objects.exists()
    told = reply.json()
    assert (told["type"], told["status"]) == ("about:blank", 422)
    checked = browser.post("/api/v1/runs/validate", body, content_type="application/json").json()
    assert (checked["ok"], checked["problems"]) == (False, told["errors"])
    assert {key: checked.get(key) for key in body} == body, "what was given comes back"
    (error,) = told["errors"]
    return error


def models(actor="actors/small", reward="rewards/small"):
    return {"actor": {"path": actor}, "reward": {"model": {"path": reward}}}


def test_a_good_spec_is_queued_and_shown(world, browser, make_spec):
    world.worker()
    reply = send(browser, spec=make_spec(models=models()))
    assert reply.status_code == 201, reply.content
    told = reply.json()
    assert told == {"id": told["id"], "url": f"/runs/{told['id']}", "name": "demo", "state": "queued"}
    summary = browser.get(f"/api/v1/runs/{told['id']}").json()
    assert (summary["preset"], summary["user"], summary["project"], summary["team"]) == ("oppo", "ada", "demo", "Letters")
    assert (summary["created_at"], summary["started_at"]) == ("2026-11-01T12:00:00Z", None)


def test_yaml_and_json_mean_the_same(world, browser, make_spec):
    world.worker()
    checked = browser.post("/api/v1/runs/validate", {"spec": make_spec()}, content_type="application/json").json()
    assert checked["ok"] is True
    again = browser.post("/api/v1/runs/validate", {"yaml": checked["yaml"]}, content_type="application/json").json()
    assert again == checked
    assert send(browser, yaml=checked["yaml"]).status_code == 201
    assert Run.objects.get().spec == checked["spec"]


def test_malformed_yaml(world, browser):
    world.worker()
    assert "not valid YAML at line 3" in complaint(browser, yaml="name: x\nsteps: [1\n")["message"]


def test_a_spec_over_256_kib(world, browser, make_spec):
    world.worker()
    assert "262,144" in complaint(browser, yaml="name: " + "x" * MAX_SPEC_BYTES)["message"]
    assert "262,144" in complaint(browser, spec=make_spec(name="x" * MAX_SPEC_BYTES))["message"]


def test_an_unknown_key_names_the_nearest(world, browser, make_spec):
    world.worker()
    told = complaint(browser, spec=make_spec(ppo={"batchsize": 8}))
    assert (told["path"], told["suggestion"]) == ("ppo.batchsize", "batch_size")


def test_a_batch_that_cannot_be_divided(world, browser, make_spec):
    world.worker()
    assert "cannot be divided" in complaint(browser, spec=make_spec(ppo={"batch_size": 10, "mini_batches": 3}))["message"]


def test_a_model_in_no_catalogue(world, browser, make_spec):
    world.worker()
    told = complaint(browser, spec=make_spec(models=models(actor="actors/smal")))
    assert (told["path"], told["value"], told["suggestion"]) == ("models.actor.path", "actors/smal", "actors/small")
    assert told["message"] == "is not in any connected worker's catalogue of models"


def test_a_model_of_a_hub_is_to_be_downloaded(world, browser, make_spec):
    world.worker()
    told = complaint(browser, spec=make_spec(models=models(actor="Qwen/Qwen2.5-0.5B")))
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir MODELS_ROOT/Qwen2.5-0.5B" in told["message"]
    for path in ("Qwen", "../Qwen", "a/b/c"):
        assert "hf download" not in complaint(browser, spec=make_spec(models=models(actor=path)))["message"]


def test_models_and_prompts_of_an_example_name_the_command_that_makes_them(world, browser, make_spec):
    world.worker()
    spec = make_spec(data={"prompts": "smollm2/sentiment.jsonl"})
    assert complaint(browser, spec=spec)["message"].endswith("; run `oppo example smollm2` on a worker to make it")


def test_a_hub_model_goes_to_a_worker_that_may_download_it(world, browser, make_spec, base_catalogue, make_entry):
    world.worker("node1")
    spec = make_spec(models=models(actor="Qwen/Qwen2.5-0.5B@main"))
    assert "is not in any connected worker's catalogue" in complaint(browser, spec=spec)["message"]
    world.worker("node2", catalogue=[*base_catalogue, {"id": "any model", "kind": "hub", "bytes": 0}])
    example = complaint(browser, spec=make_spec(models=models(actor="smollm2/model")))
    assert "oppo example smollm2" in example["message"], "the id of an example is no hub's"
    assert send(browser, spec=spec).status_code == 201
    assert Run.objects.get().needs == {
        "kind": "any", "models": ["rewards/small"], "prompts": ["letters"], "nodes": 1, "hub": True
    }  # fmt: skip
    run_cycle()
    run = Run.objects.get()
    assert (run.state, [a.node.name for a in run.attempts.all()]) == ("allocated", ["node2"])


def test_a_model_of_a_disconnected_worker_is_not_looked_for_on_the_hub(world, browser, make_spec, base_catalogue, make_entry):
    """A hub's model of this name would be another one."""
    world.worker("node1", catalogue=[*base_catalogue, make_entry("acme/policy", task="causal_lm")])
    spec = make_spec(models=models(actor="acme/policy"))
    assert send(browser, spec=spec).status_code == 201
    world.clock.advance(3600)
    world.worker("node2", catalogue=[*base_catalogue, {"id": "any model", "kind": "hub", "bytes": 0}])
    refused = send(browser, spec=spec).json()["errors"]
    assert [told["message"] for told in refused] == ["cannot be used: node node1, which has it, is not connected"]


def test_prompts_in_no_catalogue(world, browser, make_spec):
    world.worker()
    assert complaint(browser, spec=make_spec(data={"prompts": "leters"}))["suggestion"] == "letters"


def test_held_out_prompts_and_texts_are_looked_for_as_well(world, browser, make_spec, make_entry, base_catalogue):
    world.worker(catalogue=[*base_catalogue, make_entry("books", "prompts")])
    told = complaint(browser, spec=make_spec(evaluation={"prompts": "heldout"}))
    assert (told["path"], told["message"]) == (
        "evaluation.prompts",
        "is not in any connected worker's catalogue of prompts files",
    )
    told = complaint(browser, spec=make_spec(ppo={"pretraining": {"data": "bookz"}}))
    assert (told["path"], told["suggestion"]) == ("ppo.pretraining.data", "books")
    told = complaint(browser, spec=make_spec(evaluation={"prompts": "../secrets"}))
    assert (told["path"], told["message"]) == ("evaluation.prompts", "is not inside a worker's folders")
    spec = make_spec(evaluation={"prompts": "letters"}, ppo={"pretraining": {"data": "books"}})
    assert send(browser, spec=spec).status_code == 201
    assert Run.objects.get().needs["prompts"] == ["books", "letters"]


def test_stop_tokens_outside_the_actors_vocabulary(world, browser, make_spec):
    world.worker()
    told = complaint(browser, spec=make_spec(models=models(), rollout={"stop_tokens": [3, 64, 70]}))
    assert (told["path"], told["value"], told["allowed"]) == ("rollout.stop_tokens", "[64, 70]", "token ids from 0 to 63")
    assert send(browser, spec=make_spec(models=models(), rollout={"stop_tokens": [63]})).status_code == 201


@pytest.mark.parametrize("bad", ["../secrets", "/etc/passwd", "a/../../b", "~root/x", "a\\b", "a//b", "./a", "a\0b"])
def test_ids_that_lead_out_of_the_roots(world, browser, make_spec, bad):
    world.worker()
    told = complaint(browser, spec=make_spec(data={"prompts": bad}))
    assert (told["path"], told["message"]) == ("data.prompts", "is not inside a worker's folders")


def test_a_reward_model_with_another_tokenizer(world, browser, make_spec, make_entry, base_catalogue):
    world.worker(catalogue=[*base_catalogue, make_entry("rewards/b", task="sequence_classification", tokenizer_digest="b" * 64)])
    told = complaint(browser, spec=make_spec(models=models(reward="rewards/b")))
    assert told["path"] == "models.reward.model.path"
    assert "different tokenizer than the actor" in told["message"]


def test_a_reward_in_parts_is_checked_part_by_part(world, browser, make_spec, make_entry, base_catalogue):
    far = make_entry("rewards/b", task="sequence_classification", tokenizer_digest="b" * 64, context=64)
    world.worker(catalogue=[*base_catalogue, far])

    def parts(**second):
        listed = [{"rule": "letters:score"}, {"model": {"path": "rewards/b"}, **second}, {"http": {"url": "https://judge"}}]
        return make_spec(models={"actor": {"path": "actors/small"}, "reward": {"parts": listed}})

    told = browser.post("/api/v1/runs/validate", {"spec": parts()}, content_type="application/json").json()["problems"]
    assert {problem["path"] for problem in told} == {"models.reward.parts.1.model.path"}
    assert any("different tokenizer" in problem["message"] for problem in told)
    missing = {"model": {"path": "rewards/c"}}
    assert complaint(browser, spec=parts(**missing))["path"] == "models.reward.parts.1.model.path"
    # What reads text may have a tokenizer and a context of its own.
    assert send(browser, spec=parts(reads="text")).status_code == 201


def test_a_model_of_the_wrong_task_or_too_small_a_context(world, browser, make_spec, make_entry, base_catalogue):
    world.worker(catalogue=[*base_catalogue, make_entry("actors/short", task="causal_lm", context=100)])
    assert complaint(browser, spec=make_spec(models=models(actor="rewards/small")))["allowed"] == "a causal_lm model"
    assert complaint(browser, spec=make_spec(models=models(actor="actors/short")))["allowed"] == "a context of 768 or more"


def test_several_gpus_of_a_node_train_one_run(world, browser, make_spec):
    world.worker(devices=2, kind="cuda")
    told = complaint(browser, spec=make_spec(resources={"devices": 2, "kind": "cpu"}))
    assert (told["path"], told["allowed"][:27]) == ("resources.devices", "1; resources.processes divi")
    assert send(browser, spec=make_spec(resources={"devices": 2})).status_code == 201
    assert Run.objects.get().devices == 2


def test_a_run_asks_for_devices_that_no_other_setting_rules_out(world, browser, make_spec):
    """With DeepSpeed a run streams on CPUs only; given a GPU, its engine would end at once."""
    asked = make_spec(training={"backend": "deepspeed"}, overlap={"intra_step": "per_chunk"})
    world.worker(kind="cuda")
    assert complaint(browser, spec=asked)["path"] == "resources.kind"
    world.worker("node2")
    assert send(browser, spec=asked).status_code == 201
    assert Run.objects.get().needs["kind"] == "cpu"


def test_more_devices_than_exist(world, browser, make_spec):
    world.worker(devices=2, kind="cuda")
    world.worker("node2", devices=4, kind="cuda", catalogue=[])
    told = complaint(browser, spec=make_spec(resources={"devices": 5}, ppo={"batch_size": 20}))
    assert (told["path"], told["allowed"]) == ("resources.devices", "at most 4")
    # Four exist, but not where the prompts are.
    assert complaint(browser, spec=make_spec(resources={"devices": 4}))["allowed"] == "at most 2"
    assert complaint(browser, spec=make_spec(resources={"kind": "cpu"}))["path"] == "resources.kind"


def test_models_scattered_over_workers(world, browser, make_spec, base_catalogue):
    world.worker("node1", catalogue=base_catalogue[:1])
    world.worker("node2", catalogue=base_catalogue[1:])
    assert "on different workers" in complaint(browser, spec=make_spec(models=models()))["message"]


def test_without_any_worker(world, browser, make_spec):
    assert "no worker is connected" in complaint(browser, spec=make_spec())["message"]


def test_bodies_that_are_no_spec(world, browser, make_spec):
    assert complaint(browser, yaml="name: x", spec=make_spec())["message"] == "give either `yaml` or `spec`"
    assert complaint(browser)["message"] == "give either `yaml` or `spec`"
    assert send(browser, spec="text").status_code == 422
    assert browser.post("/api/v1/runs", "{", content_type="application/json").status_code == 400
    assert send(browser, spec=make_spec(), project="nowhere").status_code == 404


def test_lists_filter_and_page(world, browser):
    runs = [world.submit(name=f"run {i}") for i in range(5)]
    first = browser.get("/api/v1/runs", {"limit": 2}).json()
    assert [run["id"] for run in first["items"]] == [runs[4].pk, runs[3].pk]
    rest = browser.get("/api/v1/runs", {"limit": 9, "cursor": first["next"], "state": "queued,running", "project": "demo"}).json()
    assert ([run["id"] for run in rest["items"]], rest["next"]) == ([runs[2].pk, runs[1].pk, runs[0].pk], None)
    assert browser.get("/api/v1/runs", {"state": "running"}).json()["items"] == []
    assert browser.get("/api/v1/runs", {"state": "walking"}).status_code == 422


def test_a_list_costs_the_same_number_of_queries_however_long(world, browser, django_assert_max_num_queries):
    for _ in range(30):
        world.submit()
    with django_assert_max_num_queries(4):
        assert len(browser.get("/api/v1/runs").json()["items"]) == 30


def test_every_file_of_a_list_must_be_in_the_catalogue(world, browser, make_spec, base_catalogue, make_entry):
    world.worker(catalogue=[*base_catalogue, make_entry("parts", "prompts")])
    told = complaint(browser, spec=make_spec(data={"prompts": ["letters", "lost.parquet"]}))
    assert (told["path"], told["value"]) == ("data.prompts", "lost.parquet")
    data = {"prompts": ["letters", "parts"], "columns": {"prompt": "question"}}
    assert send(browser, spec=make_spec(data=data)).status_code == 201
    assert Run.objects.get().needs["prompts"] == ["letters", "parts"]


def test_an_entry_that_cannot_be_used_is_refused_with_its_problem(world, browser, make_spec, base_catalogue, make_entry):
    problem = "/models/linked is a link to /data/linked, outside the models root /models; copy it or move it there"
    unusable = make_entry("linked", problem=problem)
    world.worker(catalogue=[*base_catalogue, unusable])
    told = complaint(browser, spec=make_spec(models=models(actor="linked")))
    assert (told["path"], told["message"]) == ("models.actor.path", f"cannot be used: {problem}")
    page = browser.get("/runs/new").content.decode()
    assert problem in page, "the form lists it"
    world.worker("node2", catalogue=[*base_catalogue, make_entry("linked", task="causal_lm")])
    assert send(browser, spec=make_spec(models=models(actor="linked"))).status_code == 201, "another worker can use it"


def test_what_a_run_will_use_for_empty_settings_is_told_with_the_reason(world, browser, make_spec, base_catalogue, make_entry):
    world.worker(catalogue=[*base_catalogue, make_entry("smol", task="causal_lm", weights=134_515_008)])

    def chosen(**changes):
        body = {"spec": make_spec(**changes)}
        return browser.post("/api/v1/runs/validate", body, content_type="application/json").json()["chosen"]

    told = chosen(models=models(actor="smol"))
    assert told["ppo.learning_rate"] == {"value": 7e-06, "reason": "all weights of a model with 135 M weights are trained"}
    assert told["ppo.critic_learning_rate"]["value"] == 7e-05
    assert chosen(models=models(actor="smol") | {"lora": {}})["ppo.learning_rate"]["value"] == 3e-4
    assert "ppo.learning_rate" not in chosen(models=models(), ppo={"learning_rate": 1e-5})
    assert chosen(models=models()).keys() == {"overlap.chunk.size"}, "an older worker tells no number of weights"
    fork = load_spec(make_spec(models=models(actor="smol"), fork={"run": 1, "step": 1}))
    assert chosen_values(fork, node_offers()) == {}, "a fork keeps what its checkpoint's run used"


def test_a_rule_that_no_worker_has_is_refused_with_the_nearest(world, browser, make_spec, base_catalogue, make_entry):
    rules = [make_entry(name, "rule") for name in ("letters:score", "math:verify")]
    world.worker("node1", catalogue=[*base_catalogue, *rules])
    told = complaint(browser, spec=make_spec(models={"actor": TINY, "critic": "actor", "reward": {"rule": "letters:scor"}}))
    assert (told["path"], told["suggestion"]) == ("models.reward.rule", "letters:score")
    parts = [{"rule": "math:verify", "weight": 1.0}, {"rule": "mine:own", "weight": 0.5}]
    told = complaint(browser, spec=make_spec(models={"actor": TINY, "critic": "actor", "reward": {"parts": parts}}))
    assert told["path"] == "models.reward.parts.1.rule"
    world.worker("node2")  # of an older version, which reports no rules: it may have it
    assert (
        send(browser, spec=make_spec(models={"actor": TINY, "critic": "actor", "reward": {"rule": "mine:own"}})).status_code
        == 201
    )


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://judge.internal:8080/score", True), ("https://judge.example.org/score", True), ("http://judge.example.org", True),
        ("https://judge.example.org:8443/score", False), ("http://judge.internal/score", False), ("http://other:8080", False),
    ],
)  # fmt: skip
def test_reward_services_that_no_worker_may_use_are_refused(world, browser, make_spec, base_catalogue, make_entry, url, allowed):
    known = [("rule", "letters:score"), ("reward_host", "judge.internal:8080"), ("reward_host", "judge.example.org")]
    world.worker(catalogue=[*base_catalogue, *(make_entry(name, kind) for kind, name in known)])
    spec = make_spec(models={"actor": TINY, "critic": "actor", "reward": {"http": {"url": url}}})
    if allowed:
        assert send(browser, spec=spec).status_code == 201
        return
    told = complaint(browser, spec=spec)
    assert told["path"] == "models.reward.http.url"
    assert "OPPO_REWARD_HOSTS=" in told["message"]


def test_a_rule_and_prompts_on_different_workers(world, browser, make_spec, base_catalogue, make_entry):
    world.worker("node1", catalogue=[*base_catalogue, make_entry("letters:score", "rule")])
    world.worker("node2", catalogue=[make_entry("mine:own", "rule")])
    told = complaint(browser, spec=make_spec(models={"actor": TINY, "critic": "actor", "reward": {"rule": "mine:own"}}))
    assert "on different workers" in told["message"]
