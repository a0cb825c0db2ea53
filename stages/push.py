"""`fp8q push`: upload the checkpoint of a run, with its card, to the Hugging Face hub.

Nothing is sent unless that is asked for: without `--yes` the files are listed, and the hub is not asked. The token is
huggingface_hub's own (`hf auth login`, or HF_TOKEN); it is neither read nor printed here.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ..calibrate.input.hub import is_hub_name, network_errors, quiet_hub
from ..core.errors import BackendError, InputError
from ..core.files import disk_errors
from ..core.reporter import Reporter
from ..core.run import Run
from ..options import PushOptions
from ..quantize.checkpoint.card_additions import ACCURACY, NOT_EVALUATED
from .pipeline.stage import needs
from .shared.model_files import checked_model

LOGIN = "log in by `hf auth login` with a token that may write there, or set HF_TOKEN"


@dataclass(frozen=True)
class Pushed:
    """The files of a checkpoint for the repository `repo`, as (name, bytes); `url`: the commit, None where nothing was
    sent; `remarks`: what the card lacks.
    """

    repo: str
    files: tuple[tuple[str, int], ...]
    remarks: tuple[str, ...]
    url: str | None = None

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(size for _, size in self.files)


def push_checkpoint(run: Run, options: PushOptions, progress: Reporter) -> Pushed:
    """Upload `model/` of a run to the repository of `options`, or say what would be uploaded.

    Raises InputError for a name that is none, files that changed since they were written, and where the hub refuses;
    BackendError where it does not answer.
    """
    repo = options.repo
    if repo is None:
        raise InputError(run.root, "goes to no repository: none is named", "give --repo owner/name")
    if not is_hub_name(repo):
        raise InputError(f"--repo {repo}", "is no name of a repository", "give one such as owner/name")
    hashes = checked_model(run)
    planned = Pushed(repo, uploaded_files(run, hashes), card_remarks(run))
    if options.yes:
        return replace(planned, url=_upload(run, planned, options, progress))
    return planned


def uploaded_files(run: Run, hashes: Collection[str]) -> tuple[tuple[str, int], ...]:
    """The files of the run's checkpoint, by their names in it, with their sizes; hidden ones are left out.

    `hashes`: the names of files, relative to the run, whose content was checked, so that they are sent where they are
    links too. Raises InputError for another link, whose target may be any file of this machine.
    """
    files = []
    with disk_errors(run.model):
        for path in sorted(run.model.rglob("*")):
            name = path.relative_to(run.model)
            if any(part.startswith(".") for part in name.parts):
                continue
            if path.is_symlink() and path.relative_to(run.root).as_posix() not in hashes:
                raise InputError(
                    path, "is a link, and no stage of this run wrote what it leads to", "put the file in its place"
                )
            if path.is_file():
                files.append((name.as_posix(), path.stat().st_size))
    return tuple(files)


def card_remarks(run: Run) -> tuple[str, ...]:
    """Say what readers of the card will look for in vain."""
    try:
        card = run.card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return (f"there is no model card ({run.card.name})",)
    remarks = []
    if ACCURACY in card:
        remarks.append("the card says nothing of accuracy: `fp8q validate RUN` writes it there")
    if NOT_EVALUATED in card:
        remarks.append("the card has no tasks: `fp8q evaluate RUN --tasks TASKS` writes their scores there")
    return tuple(remarks)


def _upload(run: Run, planned: Pushed, options: PushOptions, progress: Reporter) -> str:
    """Upload the files; return the address of the commit."""
    needs("calibrate", ("huggingface_hub",))
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    api = HfApi(endpoint=constants.ENDPOINT)
    message = "Upload an FP8 checkpoint made by fp8q"
    drawn = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with quiet_hub(), progress.track(f"Uploading to {planned.repo}", planned.bytes, "bytes") as advance:
            made = api.create_repo(planned.repo, private=not options.public, exist_ok=True)
            commit = api.upload_folder(
                repo_id=made.repo_id,
                folder_path=run.model,
                allow_patterns=[_literal(name) for name, _ in planned.files],
                revision=options.revision,
                commit_message=message,
            )
            advance(planned.bytes)
    except OfflineModeIsEnabled:
        raise BackendError(planned.repo, "HF_HUB_OFFLINE is set", "unset it to upload") from None
    except HfHubHTTPError as error:
        raise _refusal(planned.repo, error.response.status_code) from None
    except network_errors():
        raise BackendError(planned.repo, "the hub cannot be reached", "connect, and push again") from None
    finally:
        if drawn:
            enable_progress_bars()
    return str(commit.commit_url)


def _refusal(repo: str, status: int) -> InputError | BackendError:
    """Make the error for an answer of the hub: without its text, which may repeat what was sent."""
    if status in (401, 403):
        return InputError(repo, f"the hub refuses to write there (HTTP {status})", LOGIN)
    if status == 404:
        return InputError(repo, "the hub has no such repository or branch (HTTP 404)", "check --repo and --revision")
    return BackendError(repo, f"the hub answers HTTP {status}", "push again: files that arrived are not sent twice")


def _literal(name: str) -> str:
    """The pattern that matches this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
