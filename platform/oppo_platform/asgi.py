"""The web process: `uvicorn oppo_platform.asgi:application`."""

import gc
import os
import warnings

from django.core.asgi import get_asgi_application
from django.urls import get_resolver

from oppo_platform.web.body_limit import bounded

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")

# whitenoise returns open files, which Django reads at once: the files are small or cached.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

application = bounded(get_asgi_application())

# Freeze imported objects: the garbage collector would traverse them repeatedly, a tenth of a second each time, during which no
# request is answered. URLs first: the first request would import them.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
