"""Links that work once: finding the row behind the token that somebody sent, and using it up.

Guarantee: of any number of people who use a link at the same time, one gets in (compare-and-set on `used_at`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from oppo_platform import clock
from oppo_platform.tokens import Kind, parse_token, same_digest

Link = TypeVar("Link", bound=Model)


def wanted(links: QuerySet[Link], text: str, kind: Kind) -> Link | None:
    """The link among `links` whose token this is, if it can still be used."""
    parsed = parse_token(text, kind)
    link: Any = usable(links).filter(prefix=parsed[0]).first() if parsed else None
    return link if parsed and link and same_digest(link.digest, parsed[1]) else None


def usable(links: QuerySet[Link]) -> QuerySet[Link]:
    """Those that are neither used nor expired nor revoked."""
    left = links.filter(used_at__isnull=True, expires_at__gt=clock.now())
    revocable = any(field.name == "revoked_at" for field in links.model._meta.get_fields())
    return left.filter(revoked_at__isnull=True) if revocable else left


def spend(link: Model) -> bool:
    """Use it up. False when somebody else was faster, or when it expired or was revoked meanwhile."""
    mine = usable(type(link)._default_manager.filter(pk=link.pk))
    return mine.update(used_at=clock.now()) == 1


def revoke(links: QuerySet[Any]) -> int:
    """Let links be void; returns how many were still usable."""
    return usable(links).update(revoked_at=clock.now())
