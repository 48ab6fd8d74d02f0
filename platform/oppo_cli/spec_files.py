"""Reading a spec from a file, with every complaint at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oppo_cli.home import Refusal

if TYPE_CHECKING:
    from oppo_contract import RunSpec


def read_spec(file: Path) -> RunSpec:
    """A checked spec. Raises Refusal (exit status 2) with one line for each problem."""
    from oppo_contract import SpecError
    from oppo_contract.spec import MAX_SPEC_BYTES
    from oppo_contract.yaml_text import load_yaml

    try:
        with file.open("rb") as content:
            text = content.read(MAX_SPEC_BYTES + 1).decode()
        if len(text.encode()) > MAX_SPEC_BYTES:
            raise Refusal(f"{file} is {file.stat().st_size:,} bytes long; at most {MAX_SPEC_BYTES:,} are accepted.")
        return load_yaml(text)
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{file} is not UTF-8 text.") from error
    except SpecError as error:
        raise Refusal(f"{file} is refused:\n" + "\n".join(f"  {problem}" for problem in error.problems)) from error
