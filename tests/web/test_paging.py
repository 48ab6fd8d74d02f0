"""Every list of the API has the same pages: `items` and `next`, a `limit` up to 200, and a `cursor`."""

import pytest

from oppo_platform.api.paging import MOST, paged
from oppo_platform.cursors import BadCursor
from tests.web.matrix.operations import OPERATIONS


def listings(document):
    """Operation id → description of each that answers with items."""
    schemas = document["components"]["schemas"]
    for operation in (told for path in document["paths"].values() for told in path.values()):
        reply = next(iter(operation["responses"].values())).get("content", {}).get("application/json", {}).get("schema", {})
        if "items" in schemas.get(reply.get("$ref", "").rpartition("/")[2], {}).get("properties", {}):
            yield operation


def test_every_list_can_be_walked(world, scene):
    """One item a page yields what one page of all of them does; nothing else is taken for a limit or a cursor."""
    client = world.login("ada")
    found = list(listings(client.get("/api/v1/openapi.json").json()))
    assert len(found) > 15
    for operation in found:
        name = operation["operationId"]
        limit = next(each["schema"] for each in operation["parameters"] if each["name"] == "limit")
        assert (limit["minimum"], limit["maximum"]) == (1, MOST), name
        path = f"/api/v1/{OPERATIONS[name].path.format(**scene).split('?')[0]}"
        whole = client.get(path, {"limit": MOST}).json()
        assert whole["next"] is None, name
        assert walked(client, path) == whole["items"], name
        for query in ({"limit": 0}, {"limit": MOST + 1}, {"cursor": "x"}, {"cursor": "WzFd"[:3]}):
            assert client.get(path, query).status_code == 422, (name, query)


def walked(client, path):
    items, cursor = [], ""
    while cursor is not None:
        page = client.get(path, {"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["items"]) <= 1
        items += page["items"]
        cursor = page["next"]
    return items


def test_a_page_begins_behind_the_last_item_wherever_that_is():
    rows = [{"id": n} for n in (7, 3, 9, 4, 1)]
    first = paged(rows, 2, "")
    assert [row["id"] for row in first["items"]] == [7, 3]
    assert paged(rows, 2, first["next"])["items"] == rows[2:4]
    assert paged([{"id": 8}, *rows], 2, first["next"])["items"] == rows[2:4], "something came before"
    assert paged([row for row in rows if row["id"] != 3], 2, first["next"])["items"] == rows[2:4], "the last one is gone"
    assert paged(rows[:2], 2, first["next"]) == {"items": [], "next": None}
    with pytest.raises(BadCursor):
        paged(rows, 2, "nonsense")
