"""Django's settings, all from the environment (docs/environment.md lists the variables).

Secure by default: no debug, login everywhere, strict content security policy. `oppo up` sets the variables of its own servers.
"""

from oppo_platform import environment
from oppo_platform.logs import logging_config

OPPO_HOME = environment.oppo_home()
DEBUG = environment.flag("OPPO_DEBUG")
SECRET_KEY = environment.secret_key(OPPO_HOME)
# Encryption keys of team secrets, newest first; if empty, a key is generated in OPPO_HOME/secrets_keys.
OPPO_SECRETS_KEYS = environment.words("OPPO_SECRETS_KEYS")
OPPO_BASE_URL = environment.text("OPPO_BASE_URL", "http://127.0.0.1:8000").rstrip("/")
ALLOWED_HOSTS = environment.words("OPPO_ALLOWED_HOSTS") or [
    "127.0.0.1",
    "localhost",
    "[::1]",
    environment.webhook_host(OPPO_BASE_URL),
]
CSRF_TRUSTED_ORIGINS = [OPPO_BASE_URL]

# Behind a proxy that terminates TLS. Explicit, because without a proxy a client could forge its header.
OPPO_BEHIND_PROXY = environment.flag("OPPO_BEHIND_PROXY")
if OPPO_BEHIND_PROXY:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    USE_X_FORWARDED_HOST = True
    # Login attempts are counted by the client address that the proxy reports.
    ALLAUTH_TRUSTED_PROXY_COUNT = 1
HTTPS = OPPO_BASE_URL.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
SECURE_HSTS_SECONDS = int(environment.number("OPPO_HSTS_S", 0))
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_NAME = "oppo_session"
CSRF_COOKIE_NAME = "oppo_csrf"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
# A batch of events is the largest body; endpoints set lower limits.
DATA_UPLOAD_MAX_MEMORY_SIZE = 5 * 1024 * 1024

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_htmx",
    "allauth",
    "allauth.account",
    "oppo_platform.web",
    "oppo_platform.accounts",
    "oppo_platform.projects",
    "oppo_platform.runs",
    "oppo_platform.cluster",
    "oppo_platform.scheduling",
    "oppo_platform.telemetry",
    "oppo_platform.storage",
    "oppo_platform.alerts",
    "oppo_platform.pages",
    "oppo_platform.housekeeping",
]

MIDDLEWARE = [
    "oppo_platform.web.request_id.request_id",
    "oppo_platform.api.request_wrapper.HeadRequests",
    "django.middleware.security.SecurityMiddleware",
    "oppo_platform.web.headers.ContentSecurityPolicy",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "oppo_platform.api.request_wrapper.ProblemsEverywhere",
    "oppo_platform.web.conditional.ConditionalApi",
    "oppo_platform.web.compression.CompressJson",
    "oppo_platform.web.origin.audit_origin",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    # Deny by default: a view is public only if marked so (tests/web/matrix lists those).
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
]

ROOT_URLCONF = "oppo_platform.urls"
ASGI_APPLICATION = "oppo_platform.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [environment.resources("templates")],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "oppo_platform.pages.context_processors.shell",
                "oppo_platform.storage.selectors.shell",
            ],
        },
    }
]

DATABASES = {"default": environment.database(environment.text("DATABASE_URL", environment.DEFAULT_DATABASE_URL))}
REDIS_URL = environment.text("REDIS_URL", environment.DEFAULT_REDIS_URL)
CACHES = {
    "default": {
        "BACKEND": "oppo_platform.web.shared_cache.SharedCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "oppo.cache",
        "OPTIONS": {
            "serializer": "oppo_platform.web.shared_cache.JsonSerializer",
            "socket_timeout": 0.25,
            "socket_connect_timeout": 0.25,
        },
    }
}
# The address workers use for the broker, when it differs from the platform's own.
WORKER_BROKER_URL = environment.text("OPPO_WORKER_BROKER_URL", REDIS_URL)

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "/"
ACCOUNT_LOGOUT_REDIRECT_URL = "account_login"
ACCOUNT_ADAPTER = "oppo_platform.accounts.adapter.ClosedSignup"
ACCOUNT_LOGIN_METHODS = {"username", "email"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "email*", "password1*", "password2*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_SESSION_REMEMBER = True
# Links can always be copied; with a mail server they are also sent.
OPPO_SMTP_URL = environment.text("OPPO_SMTP_URL")
globals().update(environment.mail(OPPO_SMTP_URL))
DEFAULT_FROM_EMAIL = environment.text("OPPO_MAIL_FROM", f"oppo@{environment.webhook_host(OPPO_BASE_URL)}")

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_I18N = False

STATIC_URL = "/static/"
STATIC_ROOT = OPPO_HOME / "static"
STATICFILES_DIRS = [environment.resources("static")]
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.FileSystemFinder",
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "oppo_platform.web.static_files.PlotlyFinder",
]
DOCS_SITE, DOCS_MARKDOWN = environment.docs_folders()
# `manage.py buildstatic` (run by `oppo up` and the image's build) writes hashed, compressed files that browsers cache without
# limit. Without them, and with OPPO_DEBUG, files are served from the source folder.
STATIC_BUILT = not DEBUG and (STATIC_ROOT / "staticfiles.json").is_file()
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "oppo_platform.web.static_files.HashedStatic"
        if STATIC_BUILT
        else "django.contrib.staticfiles.storage.StaticFilesStorage"
    },
}
WHITENOISE_USE_FINDERS = not STATIC_BUILT
WHITENOISE_AUTOREFRESH = not STATIC_BUILT

LOGGING = logging_config(json=not DEBUG and environment.text("OPPO_LOG_FORMAT", "json") == "json")

# Health and leases, seconds.
OPPO_LEASE_S = environment.number("OPPO_LEASE_S", 900)
OPPO_NODE_FRESH_S = environment.number("OPPO_NODE_FRESH_S", 60)
# A longer gap between two scheduler cycles counts as downtime of the control plane, and leases are extended by it.
OPPO_DOWNTIME_S = environment.number("OPPO_DOWNTIME_S", 10)
OPPO_ORPHAN_GRACE_S = environment.number("OPPO_ORPHAN_GRACE_S", 30)
OPPO_REDISPATCH_S = environment.number("OPPO_REDISPATCH_S", 15)
# How long the first node of an attempt on several waits for the others to claim their launches.
OPPO_RENDEZVOUS_S = environment.number("OPPO_RENDEZVOUS_S", 300)
# Half-life of device usage in fair shares.
OPPO_USAGE_HALF_LIFE_S = environment.number("OPPO_USAGE_HALF_LIFE_S", 7 * 24 * 3600)
# Minimum usage of a run in fair shares, so that a burst of short runs gains nothing.
OPPO_SUBMIT_PENALTY_S = environment.number("OPPO_SUBMIT_PENALTY_S", 600)
# Protection from preemption after a start.
OPPO_MIN_RUNTIME_S = environment.number("OPPO_MIN_RUNTIME_S", 600)
OPPO_MAX_ATTEMPTS = int(environment.number("OPPO_MAX_ATTEMPTS", 3))
OPPO_MAX_NODE_FAILURES = int(environment.number("OPPO_MAX_NODE_FAILURES", 20))
# Time for an engine to checkpoint and acknowledge a stop request before its supervisor kills it.
OPPO_STOP_DEADLINE_S = environment.number("OPPO_STOP_DEADLINE_S", 600)
OPPO_CANCEL_DEADLINE_S = environment.number("OPPO_CANCEL_DEADLINE_S", 5)
# Concurrent ingest transactions per process; further requests get a 429 and are retried.
OPPO_INGEST_SLOTS = int(environment.number("OPPO_INGEST_SLOTS", 6))
# Requests per minute and API token; 0: no limit.
OPPO_API_RATE = int(environment.number("OPPO_API_RATE", 600))
# Metrics per run; further ones are dropped with a line in its log.
OPPO_MOST_SERIES = int(environment.number("OPPO_MOST_SERIES", 2000))
# Events of an attempt after which its points are compacted into compressed blocks.
OPPO_SEAL_EVENTS = int(environment.number("OPPO_SEAL_EVENTS", 2000))
# Seconds between two cycles of the housekeeper.
OPPO_HOUSEKEEPING_S = environment.number("OPPO_HOUSEKEEPING_S", 5)
# Root of the checkpoints. If set explicitly, storage that all workers share; otherwise a local folder.
OPPO_ARTIFACTS_SHARED = bool(environment.text("OPPO_ARTIFACT_ROOT"))
OPPO_ARTIFACT_ROOT = environment.text("OPPO_ARTIFACT_ROOT", (OPPO_HOME / "artifacts").as_uri()).rstrip("/")
# Below this free space a node gets no new runs; on the database's disk, no run can be submitted.
OPPO_LOW_DISK_BYTES = environment.number("OPPO_LOW_DISK_BYTES", 2**30)
# The database's folder, if it is on the housekeeper's machine and PostgreSQL does not report it; and its maximum size, if its
# disk cannot be measured. Empty and 0: not monitored.
OPPO_DATABASE_FOLDER = environment.text("OPPO_DATABASE_FOLDER")
OPPO_DATABASE_MOST_BYTES = environment.number("OPPO_DATABASE_MOST_BYTES", 0)
# Seconds between two disk usage measurements of a live run.
OPPO_MEASURE_S = environment.number("OPPO_MEASURE_S", 60)
# Delay before a team's new retention rules delete anything, so that they can be corrected.
OPPO_RETENTION_GRACE_S = environment.number("OPPO_RETENTION_GRACE_S", 24 * 3600)
# Days for which a deleted run can be restored, and for which its row is kept so that its usage still counts.
OPPO_TRASH_DAYS = environment.number("OPPO_TRASH_DAYS", 7)
OPPO_TOMBSTONE_DAYS = environment.number("OPPO_TOMBSTONE_DAYS", 90)
# Webhook hosts that may have private addresses, and those that may be used without TLS. Link-local addresses are always refused.
OPPO_WEBHOOK_PRIVATE_HOSTS = environment.words("OPPO_WEBHOOK_PRIVATE_HOSTS")
OPPO_WEBHOOK_PLAIN_HOSTS = environment.words("OPPO_WEBHOOK_PLAIN_HOSTS")
# Total time of one webhook request, including DNS and TLS.
OPPO_WEBHOOK_TIMEOUT_S = environment.number("OPPO_WEBHOOK_TIMEOUT_S", 10)
# Attempts to deliver a message, and the delay before the first retry, which triples each time.
OPPO_DELIVERY_TRIES = int(environment.number("OPPO_DELIVERY_TRIES", 5))
OPPO_DELIVERY_RETRY_S = environment.number("OPPO_DELIVERY_RETRY_S", 60)
# Retention of deliveries on the settings page.
OPPO_DELIVERIES_KEPT_S = environment.number("OPPO_DELIVERIES_KEPT_S", 30 * 24 * 3600)
