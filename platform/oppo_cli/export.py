"""`oppo export`: the trained actor as a folder of its own."""

from __future__ import annotations

from pathlib import Path

import click

from oppo_cli.home import Refusal


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--merge", is_flag=True, help="Merge LoRA adapters into the weights, in float32.")
@click.option(
    "--root", "roots", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the run's models, for --merge and the base model's licence. Repeatable.",
)  # fmt: skip
def export(checkpoint: Path, out: Path, merge: bool, roots: tuple[Path, ...]) -> None:
    """Write the actor of a CHECKPOINT (…/checkpoints/step-…) to the new folder OUT, with its tokenizer and a model card.

    A Hugging Face model can be loaded with from_pretrained, LoRA adapters with peft. As the actor of another run adapters must
    be merged.
    """
    from oppo_contract.model_folder import ModelFolderError
    from oppo_core.checkpointing.atomic_dir import CheckpointError
    from oppo_core.checkpointing.export import export_actor

    try:
        names = export_actor(checkpoint, out, merge, list(roots))
    except (CheckpointError, ModelFolderError, OSError) as error:
        raise Refusal(str(error)) from None
    click.echo(f"{out}: {', '.join(names)}")
