"""Write all generated pages."""

from __future__ import annotations

from scripts.reference import PAGES, ROOT, generate

if __name__ == "__main__":
    for path in PAGES:
        (ROOT / path).write_text(generate(path), encoding="utf-8")
