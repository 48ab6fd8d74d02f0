"""The API's description is true: every operation answers what the document says to its row of the matrix (`matrix.operations`).

`OPPO_RECORD=1 pytest tests/web/api/test_openapi.py` writes the examples of the document anew, from these calls.
"""

import json
import os
import re

import jsonschema_rs
from django.db import transaction
from django.test import Client

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.api.openapi import EXAMPLES
from tests.web.matrix.operations import OPERATIONS

TEXT = ({"type": "string"}, {})  # responses that are not JSON


def document(world):
    return world.login("ada").get("/api/v1/openapi.json").json()


def described(found):
    return {told["operationId"]: told for path in found["paths"].values() for told in path.values()}


def test_schemas_have_names_of_their_own(world):
    """Two classes of one name are told apart by their modules, in names from which generated clients make one class."""
    assert not [name for name in document(world)["components"]["schemas"] if "__" in name]


def test_every_call_is_answered_as_described(world, scene):
    told = document(world)
    operations, recorded = described(told), {}
    token = create_api_token(world.people["ada"], world.team, "all", scope="admin").text
    client = Client(headers={"Authorization": f"Bearer {token}"})
    for name, row in OPERATIONS.items():
        path, body = row.filled(scene)
        text = json.dumps(body) if body is not None else ""
        with transaction.atomic():
            reply = client.generic(row.method.upper(), f"/api/v1/{path}", text, content_type="application/json")
            transaction.set_rollback(True)  # every row finds the same scene
        status, well = next(iter(operations[name]["responses"].items()))
        text = b"" if reply.streaming else reply.content
        assert reply.status_code == int(status) == row.status, (name, reply.status_code, text[:500])
        if "content" not in well:
            assert text == b"", name
            continue
        [(kind, content)] = well["content"].items()
        assert reply.headers["Content-Type"].split(";")[0] == kind, name
        if content["schema"] not in TEXT:
            check(reply.json(), content["schema"], told, name)
            recorded[name] = {"path": path, "body": body, "reply": shortened(reply.json())}
    if os.environ.get("OPPO_RECORD"):
        EXAMPLES.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


def check(value, schema, told, name):
    whole = {**schema, "components": told["components"]}
    errors = [
        f"{'/'.join(map(str, e.instance_path))}: {e.message}" for e in jsonschema_rs.validator_for(whole).iter_errors(value)
    ]
    assert not errors, (name, errors[:5])


def shown_once(value):
    """A token or a secret, without what makes it one; None for everything else."""
    found = re.match(r"oppoapi_|whsec_", value) if isinstance(value, str) else None
    return found[0] + "…" if found else None


def shortened(value):
    """What an example shows of a reply: at most two of a list, and texts of a line."""
    if isinstance(value, dict):
        return {key: shown_once(each) or shortened(each) for key, each in list(value.items())[:40]}
    if isinstance(value, list):
        return [shortened(each) for each in value[:2]]
    return value[:117] + "…" if isinstance(value, str) and len(value) > 118 else value


def test_every_example_is_one(world):
    told = document(world)
    for name, operation in described(told).items():
        well = next(iter(operation["responses"].values()))
        for content in well.get("content", {}).values():
            if content["schema"] not in TEXT:
                assert "example" in content, f"{name}: record the examples anew"
                check(content["example"], content["schema"], told, name)
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert "example" in content, f"{name}: record the examples anew"
            check(content["example"], content["schema"], told, name)


def test_404_is_a_problem(world):
    ada = world.login("ada")
    for method, path, status in (("get", "nothing", 404), ("get", "runs/x", 404), ("put", "runs", 405), ("post", "me", 405)):
        reply = ada.generic(method.upper(), f"/api/v1/{path}")
        assert (reply.status_code, reply.headers["Content-Type"]) == (status, "application/problem+json"), path
        assert reply.json()["request_id"] == reply.headers["X-Request-Id"]
    assert ada.put("/api/v1/runs").headers["Allow"] == "GET, POST"
