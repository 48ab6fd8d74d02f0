"""`python -m scripts.pictures`, from the checkout: write every drawing anew."""

from __future__ import annotations

from scripts.pictures import DRAWINGS, drawing, path_of

if __name__ == "__main__":
    for name in DRAWINGS:
        path_of(name).write_text(drawing(name), encoding="utf-8")
