"""The web process: `uvicorn oppo_platform.asgi:application`."""

import os
import warnings

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")

# whitenoise hands over open files, and Django reads them in one go: the files are small or cached for ever.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

application = get_asgi_application()
