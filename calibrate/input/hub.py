"""Distinguish names on the Hugging Face hub from paths, and download; each failure is one line with a remedy.

Only files that the stages read are downloaded: safetensors, JSON and tokenizer files of the top folder, never pickled
weights. Files in the hub's local cache are used without a network, and `HF_HUB_OFFLINE=1` restricts reading to them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.files import disk_errors
from ...core.reporter import SILENT, Reporter
from .silence import logging_from

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
#: Copies in subfolders and in other formats than Hugging Face's (Mistral's, Meta's).
UNWANTED = ("*/*", "consolidated*")
CODE = ("*.py",)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_name(text: str) -> bool:
    """Tell whether `text` looks like a hub name (`name` or `owner/name`) and not like a path."""
    return bool(_NAME.fullmatch(text)) and "--" not in text and ".." not in text and len(text) <= 96


@contextmanager
def hub_errors(kind: str, name: str, revision: str | None, remedy: str) -> Iterator[None]:
    """Turn the exceptions of downloading the `kind` ("model", "data set") `name` into InputError; `remedy` applies
    without a network.
    """
    from huggingface_hub import errors

    unreachable: tuple[type[BaseException], ...]
    unreachable = (*network_errors(), errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    try:
        yield
    except errors.GatedRepoError:
        raise InputError(
            name, f"the {kind} is gated on the hub", "accept its terms there and log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            name, f"has no revision {revision} on the hub", "name a branch, tag or commit that it has with --revision"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            name,
            f"there is no such file or directory, and no {kind} of that name on the hub",
            "check the spelling, or `hf auth login` if it is private",
        ) from None
    except unreachable:
        raise InputError(
            name,
            f"there is no such file or directory, and the hub cannot be reached to look for a {kind} of that name",
            remedy,
        ) from None


def network_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions for a network that does not answer.

    The hub's client uses httpx up to version 1, and httpx2 from version 2 on.
    """
    from huggingface_hub.errors import HfHubHTTPError

    library = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return library, HfHubHTTPError, ConnectionError, TimeoutError


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the hub's client from logging its retries in this block; restore the level after it."""
    with logging_from("huggingface_hub", CRITICAL):
        yield


def fetch_model(name: str, revision: str | None, with_code: bool, report: Reporter = SILENT) -> Path:
    """Fetch the hub model `name` at `revision` into the local cache, if necessary, and return its directory; raises
    InputError.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    allowed = [*WANTED, *(CODE if with_code else ())]
    unwanted = list(UNWANTED)
    remedy = "connect, or download it elsewhere and give the directory as MODEL"
    with quiet_hub(), disk_errors(Path(constants.HF_HUB_CACHE)), hub_errors("model", name, revision, remedy):
        try:
            bar = _silent_bar(lambda done: None)
            files = snapshot_download(
                name, revision=revision, allow_patterns=allowed, ignore_patterns=unwanted, tqdm_class=bar, dry_run=True
            )
            size = sum(file.file_size or 0 for file in files if file.will_download)
        except DryRunError:
            size = 0  # no network or no such model: the next call uses the cache or raises the error
        with report.track(f"Downloading {name}", size, "bytes") as advance:
            bar = _silent_bar(advance)
            return Path(
                snapshot_download(
                    name, revision=revision, allow_patterns=allowed, ignore_patterns=unwanted, tqdm_class=bar
                )
            )


def _silent_bar(advance: Callable[[int], None]) -> type[Any]:
    """Make a progress bar class for the hub's client that draws nothing and calls `advance` with the bytes written."""
    from huggingface_hub.utils.tqdm import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            self.counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            # the hub's client leaves it untyped
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self.counts:
                advance(int(n or 0))

    return SilentBar
