"""`oppo convert`: GGUF and PyTorch weights as a model folder with safetensors."""

from __future__ import annotations

from pathlib import Path

import click

from oppo_cli.home import Refusal


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Precision to save in."
)
def convert(source: Path, folder: Path, dtype: str) -> None:
    """Convert SOURCE, a .gguf file or a folder with pytorch_model.bin, into the new FOLDER that runs can use.

    Quantized weights are dequantized. The FOLDER has config.json, safetensors and the tokenizer; put it below a worker's models
    root.
    """
    from oppo_contract.model_folder import ModelFolderError
    from oppo_core.models.convert import convert_model

    try:
        weights = convert_model(source, folder, dtype)
    except (ModelFolderError, OSError) as error:
        raise Refusal(str(error)) from None
    click.echo(f"{folder}: {weights / 1e6:,.1f} M weights")
