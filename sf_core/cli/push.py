"""The command `sf push`: uploads the trained policy of a run to the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sf_core.cli.arguments.groups import App
from sf_core.cli.runs import RunDir
from sf_core.cli.terminal import hide_progress_bars, report_bad_input, tell

if TYPE_CHECKING:
    from sf_core.config import RunConfig
    from sf_core.reports.view import RunView

commands = App()

NAMES_A_PLACE = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys of the JSON files of a model folder that may have a path of this machine."""


@commands.command()
@report_bad_input()
def push(
    run: RunDir,
    repo: Annotated[str, typer.Argument(help="Repository on the Hugging Face Hub: OWNER/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository, if there is none.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to commit to, created if there is none. By default main.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="Message of the commit. By default a line about the run."),
    ] = None,
) -> None:
    """Upload the trained policy of a finished run to the Hugging Face Hub, with its model card.

    The token is that of `hf auth login`, or of the environment variable HF_TOKEN.
    """
    view, config = _open(run)
    about = message or f"Version {config.train.iterations} of the policy of {view.run.run_id}"
    tell(_upload(view, config, repo, private, revision, about))


def _open(uri: str) -> tuple[RunView, RunConfig]:
    """Raises ValueError if the run has no finished policy."""
    from sf_core.config import RunConfig
    from sf_core.reports.states import is_finished
    from sf_core.reports.view import RunView
    from sf_core.training.backends import trainer_kind
    from storage.tensors.weights import has_weights

    view = RunView.open(uri)
    run = view.run
    config = view.run.read_config(RunConfig)
    if not trainer_kind(config).computes_weights:
        raise ValueError(f"run {run.run_id} has no policy, because it is emulated: push another run")
    due = config.train.iterations
    if not is_finished(view, due):
        raise ValueError(
            f"run {run.run_id} is not finished ({view.progress().published} of {due} iterations), so it has "
            f"no trained policy yet: finish it with `sf resume {uri}`"
        )
    if not has_weights(run.policy_dir):
        raise ValueError(
            f"{run.policy_dir} has no weights, or only a part of them: `sf resume {uri}` does not write them "
            "again, so push from a copy of the run that has its folder policy"
        )
    return view, config


def _upload(
    view: RunView, config: RunConfig, repo: str, private: bool, revision: str | None, about: str
) -> str:
    """Commit the policy folder; returns the URL of the commit."""
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError:
        raise ValueError(
            "sf push needs the package huggingface_hub, which is not installed: install it with "
            "`pip install huggingface_hub`"
        ) from None
    from sf_core.process.environment_variables import hub_endpoint
    from sf_core.reports.export.card import CARD, find_base, write_card
    from storage.files import exists, join, local_folder

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"{repo} is no name of a repository: expected OWNER/NAME ({_line(error)})") from None
    if (token := get_token()) is None:
        raise ValueError(
            "no token of the Hugging Face Hub is here: log in with `hf auth login`, or set HF_TOKEN to a "
            "token with write access from https://huggingface.co/settings/tokens"
        )
    if not exists(join(view.run.policy_dir, CARD)):
        # an earlier version has finished the run
        write_card(view, config)
    base = find_base(config, view.run.start_dir).name
    folders = {"": local_folder(view.run.policy_dir)}
    if config.train.lora is not None:
        folders["adapter/"] = local_folder(view.run.policy_adapter_dir)
    added = [
        CommitOperationAdd(name, content)
        for prefix, folder in folders.items()
        for name, content in list_contents(folder, prefix, base)
    ]
    hide_progress_bars()
    api = HfApi(endpoint=hub_endpoint(), token=token)
    with _hub_errors(repo):
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(made.repo_id).private:
            raise ValueError(
                f"the repository {made.repo_id} exists and is public: nothing was uploaded; leave --private "
                "out, or name another repository"
            )
        if revision is not None:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        tell(f"uploading {len(added)} files to {made.repo_id}")
        done = api.create_commit(made.repo_id, added, commit_message=about, revision=revision)
    return str(done.commit_url)


def list_contents(folder: str, prefix: str, base: str | None) -> Iterator[tuple[str, str | bytes]]:
    """Names in the repository of the files directly in a folder, each with its path, or with its content if a
    path of this machine is replaced in it. `base` is the name of the base on the Hub, if it is known."""
    for path in sorted(Path(folder).iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        content = _without_paths(path, base) if path.suffix == ".json" else None
        yield f"{prefix}{path.name}", str(path) if content is None else content


def _without_paths(file: Path, base: str | None) -> bytes | None:
    """Content of a JSON file in which paths are replaced by the name of the base, or removed; None: it has
    none."""
    data: Any = json.loads(file.read_bytes())
    if not isinstance(data, dict):
        return None
    with_paths = [key for key in NAMES_A_PLACE if _is_path(data.get(key))]
    if not with_paths:
        return None
    content = {key: value for key, value in data.items() if key not in with_paths}
    if base:
        content |= dict.fromkeys(with_paths, base)
    return json.dumps(content, indent=2).encode()


def _is_path(name: object) -> bool:
    return isinstance(name, str) and (
        os.path.isabs(name) or name.startswith(("~", ".")) or os.path.exists(name)
    )


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Errors of the Hub in one sentence."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        hint = {
            401: "; the token is unknown or has expired: log in again with `hf auth login`",
            403: f"; the token may not write to {repo}: use a token with write access",
            404: f"; the owner of {repo} does not exist, or the token may not see it",
        }.get(status or 0, "")
        raise ValueError(f"the Hub refused {repo}: {_line(error)}{hint}") from None
    except RuntimeError as error:  # of one file
        raise ValueError(f"the upload to {repo} failed: {_line(error.__cause__ or error)}") from None
    except ValueError:
        raise
    except Exception as error:  # of its HTTP client, which is another library in each of its versions
        raise ValueError(f"the Hub cannot be reached: {_line(error)}") from None


def _line(error: BaseException) -> str:
    """The first line of an error, without the mark at its end."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".: ")
