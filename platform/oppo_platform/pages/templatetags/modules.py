"""Script tags of ES modules, with a preload for each module that they import."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath

from django import template
from django.conf import settings
from django.template.context import Context
from django.templatetags.static import static
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

register = template.Library()
FOLDER = PurePosixPath("js")
# Static imports only: a dynamic `import()` marks what a page loads later.
IMPORTED = re.compile(r"""^(?:import|export)\b(?:[^;"']*\bfrom)?\s*["'](\.[^"']+)["'];""", re.MULTILINE)


@register.simple_tag(takes_context=True)
def module(context: Context, name: str) -> SafeString:
    """`{% module "run/training.js" %}`: loads static/js/run/training.js, and its imports at once, not one after another."""
    name = "".join(name)  # a plain str: pathlib refuses the SafeString that a template passes
    seen = context.render_context.setdefault("modules", {name})
    new = [path for path in imports(name) if path not in seen]
    seen.update(new)
    preloads = format_html_join("\n", '<link rel="modulepreload" href="{}">', ((static(str(FOLDER / path)),) for path in new))
    return format_html('{}\n<script type="module" src="{}"></script>', preloads, static(str(FOLDER / name)))


@cache
def imports(name: str) -> tuple[str, ...]:
    """The modules that `name` imports, directly or not, in the order of the import statements."""
    root = Path(settings.STATICFILES_DIRS[0]).resolve() / FOLDER
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        current = root / waiting.pop()
        for path in IMPORTED.findall(current.read_text(encoding="utf-8")):
            imported = (current.parent / path).resolve().relative_to(root).as_posix()
            if imported not in found:
                found[imported] = None
                waiting.append(imported)
    return tuple(found)
