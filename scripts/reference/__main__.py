"""`python -m scripts.reference`, from the checkout: write every generated page anew. `make docs` runs it; a test compares."""

from __future__ import annotations

from scripts.reference import PAGES, ROOT, text_of


def main() -> None:
    """Write them."""
    for path in PAGES:
        (ROOT / path).write_text(text_of(path), encoding="utf-8")


if __name__ == "__main__":
    main()
