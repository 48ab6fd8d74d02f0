"""One-time set-up of `oppo up`, a process of its own that starts together with the servers.

It builds the static files and prints `STATIC_FILES_BUILT`, waits for the end of its input, which means that the servers accept
connections, sets the database up, and prints a line of JSON (`stack.SetupResult`).
"""

from __future__ import annotations

import gc
import json
import sys

from oppo_cli.platform_commands import set_up_django
from oppo_contract.lifeline import watch_lifeline

STATIC_FILES_BUILT = "static files are built"
CONNECT_TIMEOUT_S = 10
API_TOKEN_DAYS = 7.0
API_TOKEN_NAME = "oppo up"  # noqa: S105 - a label


def set_up() -> None:
    """Migrate, create the first user if necessary, and tokens for the worker and the terminal."""
    from django.core.management import call_command

    from oppo_platform.accounts.api_tokens import create_api_token, revoke_named
    from oppo_platform.accounts.services import create_login_link
    from oppo_platform.cluster.services import create_join_token
    from oppo_platform.projects.models import Project
    from oppo_platform.projects.services import ensure_first_user
    from oppo_platform.web.health import check_connection

    call_command("buildstatic")
    print(STATIC_FILES_BUILT, flush=True)
    sys.stdin.read()
    check_connection(CONNECT_TIMEOUT_S)
    call_command("migrate", interactive=False, verbosity=0)
    first = ensure_first_user()
    project = Project.objects.filter(team__memberships__user=first.user).select_related("team").order_by("id").first()
    assert project is not None
    revoke_named(first.user, API_TOKEN_NAME)
    result = {
        "join_token": create_join_token(hours=1),
        "username": first.user.username,
        "password": first.password,
        "login_link": create_login_link(first.user),
        "api_token": create_api_token(first.user, project.team, API_TOKEN_NAME, days=API_TOKEN_DAYS).text,
        "project": project.pk,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    gc.disable()  # the migrations' objects are many and live long; traversing them again and again takes a fifth of the time
    watch_lifeline()
    set_up_django()
    set_up()
