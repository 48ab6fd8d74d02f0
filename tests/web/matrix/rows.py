"""What a row of the matrix says: a request, and who may make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oppo_platform.accounts.models import Role

VIEWER, MEMBER, MAINTAINER, OWNER = Role.VIEWER, Role.MEMBER, Role.MAINTAINER, Role.OWNER
# Not roles of a team: administrators of the cluster; whoever is logged in; everybody.
ADMINISTRATOR, ANYBODY, PUBLIC = "administrator", "anybody", "public"


@dataclass(frozen=True)
class Row:
    """A request that works, and the least role that may make it.

    `path` and `body` name things of `scene`, which are all the team's: for everybody else they are not there (404), unless
    `least` is no role of the team. `hidden`: for colleagues whose role is not enough, neither. `only_reads`: a POST for which a
    token that reads is enough. `admin`: a token needs that scope, whatever its person's role. `status`: when all went well.
    """

    method: str
    path: str
    body: Any = None
    least: str = VIEWER
    hidden: bool = False
    only_reads: bool = False
    admin: bool = False
    status: int = 200

    @property
    def writes(self) -> bool:
        """Whether it changes something."""
        return self.method not in ("get", "head", "options") and not self.only_reads

    @property
    def of_the_team(self) -> bool:
        """Whether it is about a thing that other teams do not have."""
        return "{" in f"{self.path}{_named(self.body)}" and self.least not in (ADMINISTRATOR, ANYBODY, PUBLIC)

    def filled(self, scene: dict[str, Any]) -> tuple[str, Any]:
        """Path and body with the ids of things in place of their names."""
        body = self.body
        if isinstance(body, dict):
            body = {key: scene[named[1:-1]] if (named := _named({key: value})) else value for key, value in body.items()}
        return self.path.format(**scene), body


def _named(body: Any) -> str:
    """The things that a body names: `{team}`."""
    values = body.values() if isinstance(body, dict) else ()
    return "".join(value for value in values if isinstance(value, str) and value.startswith("{"))


def get(path: str, least: str = VIEWER, **more: Any) -> Row:
    """A row that reads."""
    return Row("get", path, None, least, **more)


def post(path: str, body: Any = None, least: str = VIEWER, **more: Any) -> Row:
    """A row that writes."""
    return Row("post", path, body, least, **more)


def delete(path: str, least: str = VIEWER, **more: Any) -> Row:
    """A row that takes something away."""
    return Row("delete", path, None, least, **more)
