"""The web process: `uvicorn oppo_platform.asgi:application`."""

import gc
import os
import warnings

from django.core.asgi import get_asgi_application
from django.urls import get_resolver

from oppo_platform.web.body_limit import bounded

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")

# whitenoise hands over open files, and Django reads them in one go: the files are small or cached for ever.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")

application = bounded(get_asgi_application())

# What is imported stays. Left to the collector it is walked through again and again, for a tenth of a second each time, in which
# no request is answered. Addresses first: the first request would import them, views and all.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
