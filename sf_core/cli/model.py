"""The command `sf model`: makes or checks a folder that `policy.model` can name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sf_core.cli.arguments.groups import App
from sf_core.cli.terminal import fail, tell
from sf_core.models.pretrained.published import (
    PUBLISHED,
    download_published_model,
    folder_of,
    is_gguf,
    make_folder,
)

commands = App()


@commands.command()
def model(
    source: Annotated[
        str,
        typer.Argument(
            help=f"Model to download ({', '.join(PUBLISHED)}), GGUF file to convert, or Hugging Face model "
            "folder to check.",
            autocompletion=lambda incomplete: [name for name in PUBLISHED if name.startswith(incomplete)],
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder to create. Required for a GGUF file. Default for a downloaded model: the cache."
        ),
    ] = None,
) -> None:
    """Download or convert a model for the setting policy.model, or check a model folder."""
    from sf_core.training.policy_folder import check_model_folder, describe_policy

    try:
        made = _make(source, folder)
        check_model_folder(str(made))
        tell(f"{made}: {describe_policy(str(made))}")
    except (ValueError, OSError) as error:
        fail(str(error).removeprefix("policy.model: "))
    named = source if made == folder_of(source) else made
    tell(f"to train it: policy.model: {named}")


def _make(source: str, folder: Path | None) -> Path:
    """The folder of the policy, which is made unless it is there."""
    if is_gguf(source):
        if folder is None:
            raise ValueError(
                f"{source} is a GGUF file: add the name of the folder to create (`sf model {source} DIR`)"
            )
        _refuse_existing(folder)
        make_folder(Path(source), folder)
        return folder
    if source not in PUBLISHED or Path(source).is_dir():
        if folder is not None:
            raise ValueError(
                f"{source} is neither a GGUF file nor one of {', '.join(PUBLISHED)}, so `sf model` cannot "
                "make a folder from it"
            )
        return Path(source)
    target = folder or folder_of(source)
    if folder is not None:
        _refuse_existing(folder)
    if not target.is_dir():
        download_published_model(source, target, tell)
    return target


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ValueError(
            f"{folder} already exists: name a new folder, or check this folder with `sf model {folder}`"
        )
