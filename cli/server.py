"""Show the address of `fp8q serve`, and end it: a signal asks it to, and a second one does not ask."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import api
from ..options import ServeOptions
from .signals import asking

if TYPE_CHECKING:
    from ..serve.web.server import Server
    from .console import Terminal


def run_server(speak: "Terminal", run: Path, options: ServeOptions, as_json: bool) -> None:
    """Serve until told to end; raises SystemExit with the signal's code where requests were broken off."""
    heard: list[int] = []

    def ready(server: "Server") -> None:
        nonlocal heard
        waiting = f"those who are being answered have {options.grace} seconds, and a second signal ends it at once"
        heard = asking(server.stop, waiting)
        if server.is_open:
            speak.note(
                f"--host {options.host}: whoever reaches this machine is answered; ask for a key with --api-key or "
                "FP8Q_API_KEY"
            )
        names = [model.name for model in server.serving.models]
        if as_json:
            sys.stdout.write(json.dumps({"url": server.url, "models": names}) + "\n")
        else:
            speak.say(f"Serving {' and '.join(names)} at {server.url} (OpenAI's API under /v1; Ctrl-C ends it)")
        sys.stdout.flush()

    cut = api.serve(run, options, ready)
    if cut and heard:
        speak.note(f"{cut} requests were broken off after {options.grace} seconds; give them more with --grace")
        raise SystemExit(128 + heard[0])
