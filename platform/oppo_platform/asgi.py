"""The web process: `uvicorn oppo_platform.asgi:application`."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")

application = get_asgi_application()
