"""Every address of the platform."""

from django.urls import include, path

from oppo_platform.accounts import views as accounts
from oppo_platform.api.auth import exempt_from_login
from oppo_platform.api.stream import stream
from oppo_platform.api.v1 import api
from oppo_platform.api.worker import worker_api
from oppo_platform.web.health import healthz

handler500 = "oppo_platform.web.health.error_page"

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("login-link/<str:token>", accounts.login_link, name="login-link"),
    path("accounts/", include("allauth.account.urls")),
    path("api/v1/stream", stream, name="stream"),
    path("api/v1/", exempt_from_login(api.urls)),
    path("api/worker/v1/", exempt_from_login(worker_api.urls)),
    path("", include("oppo_platform.pages.urls")),
]
