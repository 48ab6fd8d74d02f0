"""One-time links: look up the row of a token, and use it up.

Guarantee: of concurrent users of a link, one succeeds (compare-and-set on `used_at`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from oppo_platform import clock
from oppo_platform.tokens import Kind, parse_token, same_digest

Link = TypeVar("Link", bound=Model)


def find_link(links: QuerySet[Link], text: str, kind: Kind) -> Link | None:
    """The link among `links` with this token, if it is valid."""
    parsed = parse_token(text, kind)
    link: Any = usable(links).filter(prefix=parsed[0]).first() if parsed else None
    return link if parsed and link and same_digest(link.digest, parsed[1]) else None


def usable(links: QuerySet[Link]) -> QuerySet[Link]:
    """Links that are neither used nor expired nor revoked."""
    left = links.filter(used_at__isnull=True, expires_at__gt=clock.now())
    revocable = any(field.name == "revoked_at" for field in links.model._meta.get_fields())
    return left.filter(revoked_at__isnull=True) if revocable else left


def use_link(link: Model) -> bool:
    """Use it up. False if it was used, expired or revoked meanwhile."""
    mine = usable(type(link)._default_manager.filter(pk=link.pk))
    return mine.update(used_at=clock.now()) == 1


def revoke(links: QuerySet[Any]) -> int:
    """Revoke links; returns how many were still valid."""
    return usable(links).update(revoked_at=clock.now())
