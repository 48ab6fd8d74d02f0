"""Django's settings while testing: the real ones, away from the developer's own `.oppo`, with a quick password hash."""

import atexit
import os
import shutil
import sys
import tempfile

from tests import scratch

if "pytest" in sys.modules:
    scratch.begin()  # pytest-django reads these settings before it reads conftest.py
_home = tempfile.mkdtemp(prefix="home-", dir=os.environ.get(scratch.VARIABLE))
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ["OPPO_HOME"] = _home
os.environ.setdefault("OPPO_LOG_FORMAT", "text")

from oppo_platform.settings import *  # noqa: E402, F403

# A throttle must not meet the attempts of another test process.
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
