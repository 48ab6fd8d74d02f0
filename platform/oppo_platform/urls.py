"""Every address of the platform."""

from django.urls import include, path

from oppo_platform.accounts import views as accounts
from oppo_platform.web.health import healthz

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("login-link/<str:token>", accounts.login_link, name="login-link"),
    path("accounts/", include("allauth.account.urls")),
    path("", include("oppo_platform.pages.urls")),
]
