"""Every page, and every address of allauth and of workers: one request that works, and who may.

A new address needs a row.
"""

from tests.web.matrix.rows import ADMINISTRATOR, ANYBODY, MAINTAINER, MEMBER, OWNER, PUBLIC, Row, get, post

OF_A_RUN = ["", "/timeline", "/utilization", "/samples", "/samples/side-by-side", "/logs", "/config", "/checkpoints", "/events"]
SEEN_BY_MEMBERS = {"/secrets": MEMBER, "/audit": OWNER}
RULES = {
    **{f"{name}-threshold": "0.5" for name in ("reward_collapsed", "kl_above", "bubble_above")},
    **{f"{name}-window": "20" for name in ("not_finite", "reward_collapsed", "kl_above", "bubble_above")},
    "stalled-threshold": "5",
}
OF_A_TEAM = ["", "/storage", "/alerts", "/tokens", "/secrets", "/audit"]

PAGES: list[Row] = [
    get("/", ANYBODY, status=302),
    get("/api/v1/", ANYBODY, status=404),
    get("/api/worker/v1/", ANYBODY, status=404),
    *(
        get(f"/{page}", ANYBODY)
        for page in ("runs", "runs/new", "api", "alerts", "queue", "sharing", "compare", "compare/samples")
    ),
    get("/teams", ANYBODY, status=302),
    post("/teams/current", {"team": ""}, ANYBODY, status=302),
    post("/teams/current", {"team": "{team}"}, status=302),
    *(get(f"/runs/{{run}}{tab}") for tab in OF_A_RUN),
    get("/runs/new?from={run}"),
    get("/runs/{deleted}"),
    post("/runs/{deleted}/restore", least=MAINTAINER, status=302),
    post("/runs/{deleted}/purge", least=MAINTAINER, status=302),
    *(get(f"/teams/{{team}}{tab}", SEEN_BY_MEMBERS.get(tab, "viewer")) for tab in OF_A_TEAM),
    post("/teams/{team}/projects", {"name": "poems"}, MEMBER, status=302),
    post("/teams/{team}/members", {"user": "eve", "role": "viewer"}, OWNER, status=302),
    post("/teams/{team}/leave", status=302),
    post("/teams/{team}/members/{ben}/remove", least=OWNER, status=302),
    post("/teams/{team}/members/{removed}/restore", least=OWNER, status=302),
    post("/teams/{team}/members/{ben}/password-link", least=OWNER),
    post("/teams/{team}/members/{ben}/password-link/revoke", least=OWNER, status=302),
    post("/teams/{team}/invites", {"role": "member", "note": "yan"}, OWNER),
    post("/teams/{team}/invites/{invite}/revoke", least=OWNER, status=302),
    post("/teams/{team}/storage/rules", {"detail_days": "9"}, OWNER, status=302),
    get("/teams/{team}/alerts?webhook={webhook}", OWNER),
    post("/teams/{team}/alerts/rules", RULES, OWNER, status=302),
    post("/teams/{team}/alerts/mail", {"whose": "own"}, status=302),
    post("/teams/{team}/alerts/webhooks", {"url": "https://example.org/hook", "conditions": ["failed"]}, OWNER),
    post("/teams/{team}/alerts/webhooks/{webhook}", {"on": "1", "conditions": ["failed"]}, OWNER, status=302),
    post("/teams/{team}/alerts/webhooks/{webhook}/delete", least=OWNER, status=302),
    post("/teams/{team}/alerts/webhooks/{gone_webhook}/restore", least=OWNER, status=302),
    post("/teams/{team}/alerts/webhooks/{webhook}/test", least=OWNER, status=302),
    post("/teams/{team}/tokens/new", {"name": "mine", "days": "7", "scope": "read"}),
    post("/teams/{team}/tokens/new", {"name": "ours", "days": "7", "scope": "read", "service": "1"}, OWNER),
    post("/teams/{team}/tokens/{token}/revoke", least=OWNER, hidden=True, status=302),
    post("/teams/{team}/secrets/set", {"name": "OTHER", "value": "a secret"}, OWNER, status=302),
    post("/teams/{team}/secrets/HF_TOKEN/delete", least=OWNER, status=302),
    get("/sharing/audit", ADMINISTRATOR),
    post("/sharing/pools/{pool}", {"name": "old nodes"}, ADMINISTRATOR, status=302),
    post("/sharing/pools/{pool}/teams/{team}", {"nominal": "1"}, ADMINISTRATOR, status=302),
    post("/sharing/teams/{team}/storage", {"gib": "1"}, ADMINISTRATOR, status=302),
    post("/sharing/nodes/{node}/drain", {"reason": "dust"}, ADMINISTRATOR, status=302),
    post("/sharing/devices/{device}/put-back", least=ADMINISTRATOR, status=302),
]

ACCOUNTS: list[Row] = [
    get("/healthz", PUBLIC),
    get("/docs/", PUBLIC),
    get("/docs/tutorial.html", PUBLIC),
    get("/login-link/{login}", PUBLIC, status=302),
    get("/invites/{invited}", PUBLIC),
    post("/invites/{invited}", {"username": "zoe", "password": "x"}, PUBLIC, status=422),
    get("/password-links/{reset}", PUBLIC),
    post("/password-links/{reset}", {"password": "x", "again": "y"}, PUBLIC, status=422),
    get("/accounts/login/", PUBLIC),
    post("/accounts/login/", {"login": "ada", "password": "wrong"}, PUBLIC),
    get("/accounts/logout/", PUBLIC, status=302),
    get("/accounts/signup/", PUBLIC),  # says that signup is closed
    get("/accounts/inactive/", PUBLIC),
    get("/accounts/password/reset/", PUBLIC),
    get("/accounts/password/reset/done/", PUBLIC),
    get("/accounts/password/reset/key/1-x/", PUBLIC),
    get("/accounts/password/reset/key/done/", PUBLIC),
    get("/accounts/confirm-email/", PUBLIC),
    get("/accounts/confirm-email/x/", PUBLIC),
    get("/accounts/login/code/confirm/", PUBLIC, status=302),
    get("/accounts/email/", ANYBODY),
    get("/accounts/password/change/", ANYBODY),
    get("/accounts/password/set/", ANYBODY, status=302),
    get("/accounts/reauthenticate/", ANYBODY),
]

# By the one of the three tokens that opens it.
BEAT = {"devices": [], "attempts": []}
MINE = {"epoch": 1}
WORKERS: dict[str, list[Row]] = {
    "join": [post("join", {"name": "node9", "hostname": "host", "cpus": 2, "memory_bytes": 1})],
    "node": [post("heartbeat", BEAT), post("attempts/{attempt}/claim", MINE, status=409)],
    "attempt": [
        post("attempts/{attempt}/heartbeat", MINE | {"running": True}),
        post("attempts/{attempt}/events", {"producer": "engine", "events": []}, status=422),
        post("attempts/{attempt}/checkpoints", {}, status=422),
        post("attempts/{attempt}/outcome", {}, status=422),
    ],
}
