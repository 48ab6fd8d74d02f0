"""`oppo export`: the trained actor as a model folder."""

from __future__ import annotations

from pathlib import Path

import click

from oppo_cli.home import Refusal


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(checkpoint: Path, out: Path) -> None:
    """Write the actor of a CHECKPOINT (…/checkpoints/step-…) to the new folder OUT, with its tokenizer.

    A Hugging Face model can be loaded with from_pretrained; LoRA adapters are merged into the weights.
    """
    from oppo_core.checkpointing.export import export_actor
    from oppo_core.checkpointing.save_restore import CheckpointError

    try:
        names = export_actor(checkpoint, out)
    except (CheckpointError, OSError) as error:
        raise Refusal(str(error)) from None
    click.echo(f"{out}: {', '.join(names)}")
