"""Follow README.md from a fresh clone to an answered request, for vLLM and for Triton, or to a verdict without
calibration, and time each command.

    python benchmarks/first_evening.py --ways vllm|triton|quicker [--vllm HOME --server HOME]
        [--model NAME] [--save NAME]

The command lines are those of the README's blocks that are marked `<!-- way NAME -->`; nothing of them is repeated
here. They run in a new clone, with a new environment, on the demo's checkpoint, or on a model of `real_checkpoints.py`
and WikiText-2's test text. `quicker` begins with the installation of the first way. A server is started in the
background and its time is that until it is ready. `STAND_INS` has what replaces a part that this machine lacks: the
GPU, Docker, vLLM's GPU build. The limits are six commands and two pages for each way.

`--vllm`, `--server`: the environments that `make test-elsewhere` leaves in `.venv/vllm` and `.venv/vllm-server`.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import SHARED
from real_checkpoints import MODELS, checkpoint
from result import ROOT, arguments, described, publish
from vllm_server import START_S

from fp8q.core.errors import GateError
from fp8q.validate.accuracy.decision import WORDS

PAGE = "README.md"
BLOCK = re.compile(r"^<!-- way (\w+) -->\n+```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_COMMANDS, MOST_PAGES = 6, 2
#: A way -> the way whose installation it begins with.
INSTALLED_AS = {"quicker": "vllm"}
INSTALLS = ("python3 -m venv", ".venv/bin/pip install")
PORT = 8000
#: The text of `--model`.
TEXT = SHARED / "data" / "wikitext-2-raw-test.txt"
RIG = ROOT / "tests" / "serve" / "real" / "rig" / "tritonserver.py"
#: The README's placeholders, and what a newcomer without a model of his own puts there.
NAMES = {
    "MODEL": "examples/demo/checkpoint", "TEXT": "examples/demo/calibration.txt", "RUN": "runs/mine", "FP8": "runs/fp8",
    "OUT": "runs/compared",
}  # fmt: skip
#: How the line of a verdict begins.
VERDICTS = tuple(f"{word}:" for word in WORDS.values())
#: How a server's command begins -> the path that answers once it is ready.
SERVERS = {"vllm serve": "/health", "docker run": "/v2/health/ready"}
#: Variables and options of vLLM's CPU build, which the GPU build does without.
VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
VLLM_OPTIONS = "--dtype bfloat16 --enforce-eager --distributed-executor-backend uni --kv-cache-memory-bytes 268435456"
#: `vllm serve`, whose command line asks for a package named vllm; the CPU build is named vllm-cpu.
VLLM_PROGRAM = '#!/bin/sh\nshift\nexec "{home}/bin/python" -P -m vllm.entrypoints.openai.api_server --model "$@"\n'
#: What of a command is replaced here, by what, and why.
STAND_INS = (
    (r"--preset exact --for vllm$", "--preset fast --for vllm", "one code: vLLM's CPU build refuses weights alone"),
    (r"^vllm serve .*", rf"\g<0> {VLLM_OPTIONS} --port {{port}}", "vLLM's CPU build serves"),
    (r"tensorrt\]", "tensorrt-rtx]", "TensorRT-RTX builds without a GPU; TensorRT needs one"),
    (r"^docker build .*", "true", "the image is the environment that `make triton` leaves in .venv/triton"),
    (
        r"^docker run .*",
        f"{shlex.quote(sys.executable)} {shlex.quote(str(RIG))} {{run}}/triton --port {{port}}",
        "a real tritonserver outside Docker, on a CPU",
    ),
)


@dataclass(frozen=True)
class Command:
    """A command line of the README, what runs in its place on this machine, and the reasons for the difference."""

    line: str
    run_as: str
    stand_ins: tuple[str, ...] = ()

    @property
    def statuses(self) -> tuple[int, ...]:
        """The exit codes of an answer: a model in codes may be worse than the limits, a server not than its run."""
        return (0, GateError.exit_code) if "fp8q compare MODEL" in self.line else (0,)

    @property
    def health(self) -> str | None:
        """The path that tells that this server is ready; None for a command that ends."""
        return next((path for begin, path in SERVERS.items() if self.line.startswith(begin)), None)


def lines_of(way: str, page: str) -> list[str]:
    """The command lines of the block `<!-- way WAY -->` on `page`, without comments; continued lines are joined."""
    blocks = dict(BLOCK.findall(page))
    if way not in blocks:
        raise ValueError(f"{PAGE}: has no block `<!-- way {way} -->`, only {sorted(blocks)}")
    lines = [re.sub(r"\s+# .*|^# .*", "", line).strip() for line in blocks[way].replace("\\\n", " ").splitlines()]
    before = lines_of(INSTALLED_AS[way], page) if way in INSTALLED_AS else []
    return [*(line for line in before if line.startswith(INSTALLS)), *(line for line in lines if line)]


def command(line: str, port: int, names: Mapping[str, str] = NAMES) -> Command:
    """The command of a README's `line`: placeholders filled by `names`, and parts replaced that this machine lacks."""
    run_as, reasons = line, list[str]()
    for pattern, replacement, reason in STAND_INS:
        replaced = re.sub(pattern, replacement.format(port=port, run=NAMES["RUN"]), run_as)
        if replaced != run_as:
            run_as, reasons = replaced, [*reasons, reason]
    for name, value in names.items():
        run_as = re.sub(rf"\b{name}\b", value, run_as)
    return Command(line, run_as.replace(f"localhost:{PORT}", f"localhost:{port}"), tuple(reasons))


def vllm_environment(home: Path, vllm: Path, server: Path) -> None:
    """Make `home` an environment with pip that has the packages of `vllm` and `server`, as after `pip install vllm`."""
    venv.create(home, symlinks=True, with_pip=True)
    paths = [sysconfig.get_path("purelib", "venv", {"base": str(each)}) for each in (vllm, server)]
    below = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)})) / "below.pth"
    below.write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths), encoding="utf-8")
    program = home / "bin" / "vllm"
    program.write_text(VLLM_PROGRAM.format(home=home), encoding="utf-8")
    program.chmod(0o755)


def ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `url` answers 200. Raises RuntimeError with the end of `log` where the server ends before."""
    until = time.monotonic() + START_S
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < until and process.poll() is None:
        try:
            with directly.open(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url}: not ready\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}")


@contextmanager
def started(asked: Command, clone: Path, variables: Mapping[str, str], port: int) -> Iterator[str]:
    """The last line of a server's log once the server is ready; it is ended with the block."""
    log = clone.parent / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {asked.run_as}"], cwd=clone, env=variables, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        ready(f"http://127.0.0.1:{port}{asked.health}", process, log)
        yield "ready"
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ended(asked: Command, clone: Path, variables: Mapping[str, str]) -> str:
    """The last line that a command prints, or its verdict. Raises RuntimeError where it fails."""
    words = ["bash", "-c", asked.run_as]
    done = subprocess.run(words, check=False, cwd=clone, env=variables, capture_output=True, text=True)
    if done.returncode not in asked.statuses:
        raise RuntimeError(f"{asked.run_as}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    lines = done.stdout.replace(f"{ROOT}/", "").strip().splitlines() or [""]
    return next((line for line in lines if line.startswith(VERDICTS)), lines[-1])


def follow(way: str, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the commands of a way in a new clone of `source`, each timed."""
    folder, port = source.parent / way, options.port
    clone = folder / "fp8q"
    subprocess.run(["git", "clone", "--quiet", source, clone], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    if way == "vllm":
        vllm_environment(folder / "vllm", options.vllm.absolute(), options.server.absolute())
        variables |= VLLM_VARIABLES | {"PATH": f"{folder / 'vllm' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    names = NAMES | ({"MODEL": str(checkpoint(options.model)), "TEXT": str(TEXT)} if options.model else {})
    commands = [command(line, port, names) for line in lines_of(way, (clone / PAGE).read_text(encoding="utf-8"))]
    steps: list[dict[str, Any]] = []
    with ExitStack() as servers:
        for asked in commands:
            begun = time.monotonic()
            if asked.health:
                said = servers.enter_context(started(asked, clone, variables, port))
            else:
                said = ended(asked, clone, variables)
            seconds = round(time.monotonic() - begun, 1)
            steps.append({"command": asked.line, "seconds": seconds, "stand_ins": asked.stand_ins, "said": said})
            print(f"{way}: {seconds:7.1f} s  {asked.line}", file=sys.stderr, flush=True)
    return {
        "commands": steps,
        "pages": [PAGE],
        "minutes": round(sum(step["seconds"] for step in steps) / 60, 1),
        "answer": steps[-1]["said"],
    }


def passed(ways: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether each way ends with an answer, within the limits of commands and pages."""
    return all(
        way["answer"] and len(way["commands"]) <= MOST_COMMANDS and len(way["pages"]) <= MOST_PAGES
        for way in ways.values()
    )


def main() -> int:
    """Run, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("--ways", nargs="+", default=["vllm", "triton"])
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv" / "vllm")
    parser.add_argument("--server", type=Path, default=ROOT / ".venv" / "vllm-server")
    parser.add_argument("--model", choices=MODELS, help="a model of real_checkpoints.py instead of the demo's")
    parser.add_argument("--port", type=int, default=PORT, help="of the servers; Triton takes the next two as well")
    options = parser.parse_args()
    head, ways = described("first_evening"), {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        subprocess.run(["git", "clone", "--quiet", "--bare", ROOT, source], check=True)
        for way in options.ways:
            ways[way] = follow(way, source, options)
    limits = {"limits": [MOST_COMMANDS, MOST_PAGES]} | ({"model": options.model} if options.model else {})
    return publish(head, {**limits, "ways": ways, "passed": passed(ways)}, options.save)


if __name__ == "__main__":
    sys.exit(main())
