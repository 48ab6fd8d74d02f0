"""Django's settings, all from the environment (docs/environment.md lists the variables).

Secure by default: no debug, login everywhere, strict content security policy. `oppo up` sets what it starts itself.
"""

from oppo_platform import environment
from oppo_platform.logs import logging_config

OPPO_HOME = environment.oppo_home()
DEBUG = environment.flag("OPPO_DEBUG")
SECRET_KEY = environment.secret_key(OPPO_HOME)
# What team secrets are sealed with, newest first; without any, keys are generated and kept in OPPO_HOME/secrets_keys.
OPPO_SECRETS_KEYS = environment.words("OPPO_SECRETS_KEYS")
OPPO_BASE_URL = environment.text("OPPO_BASE_URL", "http://127.0.0.1:8000").rstrip("/")
ALLOWED_HOSTS = environment.words("OPPO_ALLOWED_HOSTS") or [
    "127.0.0.1",
    "localhost",
    "[::1]",
    environment.webhook_host(OPPO_BASE_URL),
]
CSRF_TRUSTED_ORIGINS = [OPPO_BASE_URL]

# Behind a proxy that ends TLS. Trusting its header is an explicit choice: anybody else could forge it.
OPPO_BEHIND_PROXY = environment.flag("OPPO_BEHIND_PROXY")
if OPPO_BEHIND_PROXY:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    USE_X_FORWARDED_HOST = True
    # Whose log-in attempts are counted: the address that the one proxy saw.
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
# One batch of events is the largest body; the endpoints set lower limits of their own.
DATA_UPLOAD_MAX_MEMORY_SIZE = 5 * 1024 * 1024

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
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
    # Deny by default: a view is public only if it says so (tests/web/matrix lists those).
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
# Links can always be copied by hand; with a mail server they are sent as well.
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
# `manage.py buildstatic` (run by `oppo up` and the image's build) writes hashed, compressed files that browsers may keep for
# ever. Without them, and while debugging, files are served from where they lie.
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
# A gap between two cycles of the scheduler that is longer was downtime of the control plane; leases are credited with it.
OPPO_DOWNTIME_S = environment.number("OPPO_DOWNTIME_S", 10)
OPPO_ORPHAN_GRACE_S = environment.number("OPPO_ORPHAN_GRACE_S", 30)
OPPO_REDISPATCH_S = environment.number("OPPO_REDISPATCH_S", 15)
# How long the first node of an attempt on several waits for the others to claim their launches.
OPPO_RENDEZVOUS_S = environment.number("OPPO_RENDEZVOUS_S", 300)
# Use of devices counts half for fair shares after this long.
OPPO_USAGE_HALF_LIFE_S = environment.number("OPPO_USAGE_HALF_LIFE_S", 7 * 24 * 3600)
# A run counts for fair shares as at least this long on its devices, so that a burst of short ones cannot win.
OPPO_SUBMIT_PENALTY_S = environment.number("OPPO_SUBMIT_PENALTY_S", 600)
# Nobody is preempted sooner.
OPPO_MIN_RUNTIME_S = environment.number("OPPO_MIN_RUNTIME_S", 600)
OPPO_MAX_ATTEMPTS = int(environment.number("OPPO_MAX_ATTEMPTS", 3))
# How long an engine that was asked to stop may take to save and acknowledge before its supervisor kills it.
OPPO_STOP_DEADLINE_S = environment.number("OPPO_STOP_DEADLINE_S", 600)
OPPO_CANCEL_DEADLINE_S = environment.number("OPPO_CANCEL_DEADLINE_S", 5)
# Ingest transactions at the same time in one process; above it a worker is told to come again.
OPPO_INGEST_SLOTS = int(environment.number("OPPO_INGEST_SLOTS", 6))
# Requests a minute that one API token may make; 0: any number.
OPPO_API_RATE = int(environment.number("OPPO_API_RATE", 600))
# Metrics a run may have; more are refused with a line in its log.
OPPO_MOST_SERIES = int(environment.number("OPPO_MOST_SERIES", 2000))
# The points of an attempt are sealed into compressed blocks after so many of its events.
OPPO_SEAL_EVENTS = int(environment.number("OPPO_SEAL_EVENTS", 2000))
# Seconds between two rounds of the housekeeper.
OPPO_HOUSEKEEPING_S = environment.number("OPPO_HOUSEKEEPING_S", 5)
# Where checkpoints live. Named explicitly it is a path that every worker shares; otherwise it is this machine's own.
OPPO_ARTIFACTS_SHARED = bool(environment.text("OPPO_ARTIFACT_ROOT"))
OPPO_ARTIFACT_ROOT = environment.text("OPPO_ARTIFACT_ROOT", (OPPO_HOME / "artifacts").as_uri()).rstrip("/")
# A disk with less free than this is low: its node gets nothing new; the database's: no run is submitted.
OPPO_LOW_DISK_BYTES = environment.number("OPPO_LOW_DISK_BYTES", 2**30)
# Where the database lies, when that is a folder of the housekeeper's machine and PostgreSQL does not say; and how large it may
# become, where its disk cannot be looked at. Empty and 0: not watched.
OPPO_DATABASE_FOLDER = environment.text("OPPO_DATABASE_FOLDER")
OPPO_DATABASE_MOST_BYTES = environment.number("OPPO_DATABASE_MOST_BYTES", 0)
# Seconds between two measurements of what a run that goes on takes.
OPPO_MEASURE_S = environment.number("OPPO_MEASURE_S", 60)
# A team's new retention deletes nothing before so many seconds: time to change one's mind.
OPPO_RETENTION_GRACE_S = environment.number("OPPO_RETENTION_GRACE_S", 24 * 3600)
# How long a deleted run can be restored, days; and how long a line says that it was there, so that what it used still counts.
OPPO_TRASH_DAYS = environment.number("OPPO_TRASH_DAYS", 7)
OPPO_TOMBSTONE_DAYS = environment.number("OPPO_TOMBSTONE_DAYS", 90)
# Hosts to which webhooks may go although their addresses are private, and those that may do without TLS. Link-local ones never.
OPPO_WEBHOOK_PRIVATE_HOSTS = environment.words("OPPO_WEBHOOK_PRIVATE_HOSTS")
OPPO_WEBHOOK_PLAIN_HOSTS = environment.words("OPPO_WEBHOOK_PLAIN_HOSTS")
# What one post to a webhook may take in all, name and handshake included.
OPPO_WEBHOOK_TIMEOUT_S = environment.number("OPPO_WEBHOOK_TIMEOUT_S", 10)
# A message to a webhook or a person is tried so many times; the first wait between two tries, which trebles each time.
OPPO_DELIVERY_TRIES = int(environment.number("OPPO_DELIVERY_TRIES", 5))
OPPO_DELIVERY_RETRY_S = environment.number("OPPO_DELIVERY_RETRY_S", 60)
# How long deliveries are kept on the settings page.
OPPO_DELIVERIES_KEPT_S = environment.number("OPPO_DELIVERIES_KEPT_S", 30 * 24 * 3600)
