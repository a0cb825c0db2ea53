"""The campaign: seeded cases in forked workers, some in real processes, kills; what they found, as a table and as JSON.

    python tests/faults/campaign.py --minutes 10 --seed 1      what `make fuzz MINUTES=10` runs
    python tests/faults/campaign.py --case 1:4711 --keep       one case again, its world kept

A case is told by its seed and its index alone. Exit 1 where anything was found.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from workers import (
    MEMORY,
    QUIET,
    Ended,
    Running,
    Start,
    ended,
    launch,
    limit,
    mapped_bytes,
    run_once,
    settle_caches,
    settle_process,
    tell_modules,
    wait,
    warm_up,
)

if os.environ.get("FP8Q_FUZZ") != "1":  # what libraries read when they are imported must be there before Python is
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | QUIET | {"FP8Q_FUZZ": "1"})

import world as worlds
from case import ON_A_RUN, ON_CHECKPOINTS, ON_HOSTILE, ON_LEARNED, Case, calibrate, copy_world
from cases import SUBJECTS, draw_case
from findings import Findings, table
from kills import kill_cases
from options_drawn import names
from oracle import Result, Snapshot, Verdict, judge, result, snapshot
from served import serve

#: A case that takes longer hangs.
HANG_S = 60.0
#: A real process in so many cases: it takes as long as twenty forks, and is there to notice where forks differ.
REAL_EVERY = 100
#: Cases between two lines about how far it is.
TOLD_EVERY = 500


class Campaign:
    """A world, what is known of its commands, and the cases drawn from it."""

    def __init__(
        self, root: Path, kept: Path | None = None, hang_s: float = HANG_S, subjects: Sequence[str] | None = None,
        real_every: int = REAL_EVERY,
    ):  # fmt: skip
        """Work in `root`; the world is made there, or in `kept`, where it is found again. All cases are of `subjects`,
        where there are any; one in `real_every` is a real process.
        """
        self.subjects = {name: SUBJECTS[name] for name in subjects or SUBJECTS}
        self.root, self.world = root, (kept or root / "world") / "w"
        self.hang_s, self.real_every, self.stopped = hang_s, real_every, False
        self.modules = self.world.with_name("modules")
        self.server = 0
        self.bases: dict[tuple[str, ...], Result | None] = {}
        self.known: dict[str, tuple[str, ...]] = {}

    def make_world(self) -> None:
        """The valid world, by commands in forks, whose imports this process takes over."""
        if self.modules.exists():
            warm_up(self.modules.read_text(encoding="utf-8").splitlines())
        else:
            self.child("inputs", lambda: worlds.make_inputs(self.world))
            here, made = Path.cwd(), dict.fromkeys(list(sys.modules))
            os.chdir(self.world)
            worlds.make_runs(lambda *argv: self.well(argv))
            os.chdir(here)
            made |= dict.fromkeys(sys.modules)
            self.modules.write_text("\n".join(made), encoding="utf-8")
        self.server, port = serve(self.root)
        (self.root / "port").write_text(str(port), encoding="utf-8")
        for name in {argv[0] for argv, _ in ON_A_RUN} | {argv[0] for argv in ON_CHECKPOINTS}:
            self.known[name] = names(self.run(Start([name, "--help"], self.fresh("help"))).out)

    def run_each_once(self) -> None:
        """Run every command once in this process, each in a world of its own, before there are cases."""
        settle_caches()
        on_runs = [argv for argv, _ in (*ON_A_RUN, *ON_LEARNED)]
        for argv in (calibrate(), calibrate("sharded", "--stream"), *on_runs, *ON_CHECKPOINTS, *ON_HOSTILE):
            folder = self.root / "once"
            self.clear(folder)
            copy_world(self.world, folder)
            run_once(argv, folder)
            self.clear(folder)
        settle_process()

    def end_server(self) -> None:
        """End the server of the cases, where it was started."""
        if self.server:
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)

    def child(self, name: str, work: "object") -> None:
        """Do something in a fork, so that this process stays as it is but for what it imports."""
        modules = self.root / "modules"
        pid = os.fork()
        if pid == 0:
            work()  # type: ignore[operator]
            modules.write_text("\n".join(sys.modules), encoding="utf-8")
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"{name}: the world could not be made")
        warm_up(modules.read_text(encoding="utf-8").splitlines())

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Draw no further case."""
        self.stopped = True

    def goes_on(self, until: float) -> bool:
        """Whether there is time for another case."""
        return not self.stopped and time.monotonic() < until

    def fresh(self, name: str) -> Path:
        """An empty folder for one command."""
        folder = self.root / name
        self.clear(folder)
        folder.mkdir()
        return folder

    def clear(self, folder: Path) -> None:
        """Remove a case's folder and what lies beside it."""
        for path in (folder, folder.with_name(folder.name + ".tmp")):
            shutil.rmtree(path, ignore_errors=True)
        for name in (".out", ".err"):
            folder.with_name(folder.name + name).unlink(missing_ok=True)

    def run(self, start: Start) -> Ended:
        """A command, to its end."""
        return wait(launch(start))

    def well(self, argv: tuple[str, ...]) -> None:
        """A command of the valid world, which must end well."""
        modules = self.root / "modules"
        end = self.run(Start(argv, self.world, before=tell_modules(modules)))
        shutil.rmtree(self.world.with_name("w.tmp"))
        if end.code:
            raise SystemExit(f"fp8q {' '.join(argv)}: ended with {end.code}: {end.err}")
        warm_up(modules.read_text(encoding="utf-8").splitlines())

    def base(self, case: Case) -> Result | None:
        """What the case's command makes of the unchanged world; None where it fails there."""
        if case.base not in self.bases:
            folder = self.root / "base"
            self.clear(folder)
            copy_world(self.world, folder)
            unchanged = Case(0, 0, "base", folder, list(case.base), case.base)
            before = snapshot(folder)
            end = self.run(Start(unchanged.argv, folder))
            if end.code == 0:
                self.bases[case.base] = result(unchanged, before, end)
            else:
                print(f"fp8q {' '.join(case.base)}: {end.code} in the valid world: {end.err}", flush=True)
                self.bases[case.base] = None
        return self.bases[case.base]

    def verdicts(self, case: Case, before: Snapshot, end: Ended) -> list[Verdict]:
        """Every fault of a case that has ended."""
        try:
            found = judge(case, before, end, self.base(case) if end.code == 0 else None)
        except Exception:  # noqa: BLE001  # one case that the judge cannot judge is no reason to lose the others
            return [Verdict("judge", traceback.format_exc()[-1500:])]
        if not found and end.code == 0 and case.subject == "model" and case.argv[0] == "calibrate":
            found = self.other_way(case)
        return found

    def other_way(self, case: Case) -> list[Verdict]:
        """A model that was accepted, read the other way, streamed or in memory: it has the same statistics."""
        streamed = "--stream" in case.argv
        folder = self.root / "other-way"
        self.clear(folder)
        again = draw_case(case.seed, case.index, self.world, folder, self.known, self.subjects)
        argv = [word for word in again.argv if word != "--stream"] + ["--stream"] * (not streamed)
        end = self.run(Start(argv, folder))
        if end.code:
            return [Verdict("silent", f"{'in memory' if streamed else 'streamed'} it is refused: {end.err[-300:]}")]
        files = [place / "out" / "statistics.safetensors" for place in (case.folder, folder)]
        if files[0].read_bytes() != files[1].read_bytes():
            return [Verdict("silent", "in memory and streamed, the statistics differ")]
        return []

    def begin(self, seed: int, index: int, real: bool) -> "tuple[Case, Snapshot, Running]":
        """Draw a case and start it."""
        folder = self.root / f"case-{index}"
        self.clear(folder)
        case = draw_case(seed, index, self.world, folder, self.known, self.subjects)
        start = Start(case.argv, folder, case.environment, case.start, real, typed=case.typed)
        return case, snapshot(folder), launch(start)

    def cases(
        self, seed: int, first: int, counts: tuple[int, int], until: float, jobs: int
    ) -> Iterator[tuple[Case, Ended, list[Verdict], bool]]:
        """Run cases from `first` on, `jobs` at once, until the clock says `until`; as many as `counts` at least and at
        most.
        """
        waiting: list[tuple[Case, Snapshot, Running, bool]] = []
        index = first

        def another() -> bool:
            begun, (least, most) = index - first, counts
            return begun < most and (self.goes_on(until) or (begun < least and not self.stopped))

        try:
            while waiting or another():
                while len(waiting) < jobs and another():
                    real = index % self.real_every == self.real_every - 1
                    waiting.append((*self.begin(seed, index, real), real))
                    index += 1
                for entry in list(waiting):
                    case, before, running, real = entry
                    end = ended(running, self.hang_s)
                    if end is None:
                        continue
                    waiting.remove(entry)
                    yield case, end, self.verdicts(case, before, end), real
                    self.clear(case.folder)
                time.sleep(0.002)
        finally:
            for _, _, running, _ in waiting:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Meet fp8q with what is wrong, and see whether it stumbles.")
    parser.add_argument("--minutes", type=float, default=2.0, help="of cases, the world and the kills aside")
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--least", type=int, default=0, help="so many cases however long they take")
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--subject", action="append", choices=SUBJECTS, help="cases of this one alone, or of several; so --case wants "
        "it again",
    )  # fmt: skip
    parser.add_argument("--hang", type=float, default=HANG_S, help="seconds after which a case hangs")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once")
    parser.add_argument("--real-every", type=int, default=REAL_EVERY, help="one case in so many is a real process")
    parser.add_argument("--kills", type=int, default=0, help="how many calibrations and conversions to kill and finish")
    parser.add_argument("--case", metavar="SEED:INDEX", help="run this one case, and show all of it")
    parser.add_argument("--world", type=Path, help="make the world in this folder, and find it there another time")
    parser.add_argument("--keep", action="store_true", help="keep the world of --case")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    return parser.parse_args()


def show(campaign: Campaign, text: str) -> int:
    """One case again, all of it shown."""
    seed, index = map(int, text.split(":"))
    case, before, running = campaign.begin(seed, index, real=False)
    end = wait(running, campaign.hang_s)
    verdicts = campaign.verdicts(case, before, end)
    print(f"{case}\n{case.folder}\nexit {end.code} in {end.seconds:.1f} s\n{end.out}\n{end.err}")
    for verdict in verdicts:
        print(f"{verdict.kind.upper()} {verdict.seen}")
    return bool(verdicts)


def main() -> int:
    """Run what was asked for; whether anything was found."""
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the world is cleared away then too
    root, ending = Path(tempfile.mkdtemp(prefix="fp8q-faults-")), ExitStack()
    try:
        campaign = Campaign(root, asked.world, asked.hang, asked.subject, asked.real_every)
        begun = time.monotonic()
        ending.callback(campaign.end_server)
        campaign.make_world()
        if asked.case:
            return show(campaign, asked.case)
        campaign.run_each_once()
        findings, start = Findings(), time.monotonic()
        print(f"the world was made in {start - begun:.0f} s", flush=True)
        signal.signal(signal.SIGINT, campaign.stop)  # what was found until then is told
        limit(resource.RLIMIT_AS, mapped_bytes() + 2 * MEMORY)
        for case, end, verdicts, real in campaign.cases(
            asked.seed, asked.first, (asked.least, asked.cases), start + 60 * asked.minutes, asked.jobs
        ):
            findings.add(case, end, verdicts, real)
            if findings.cases % TOLD_EVERY == 0:
                minutes = (time.monotonic() - start) / 60
                print(f"{findings.cases:,} cases in {minutes:.1f} minutes, {len(findings.faults)} found", flush=True)
        findings.seconds = time.monotonic() - start
        killed = kill_cases(campaign, asked.seed, 0 if campaign.stopped else asked.kills)
        print(table(findings, killed))
        counts = {
            "seed": asked.seed, "cases": findings.cases, "real_processes": findings.real,
            "exit_codes": {str(code): number for code, number in sorted(findings.codes.items())},
            "faults": dict(findings.kinds), "seconds": round(findings.seconds, 1), "kills": len(killed),
            "kills_streamed": sum(kill.streamed for kill in killed),
            "kills_of_conversions": sum(kill.converts for kill in killed),
            "kills_with_faults": sum(bool(kill.faults) for kill in killed),
        }  # fmt: skip
        broken = [{"what": kill.what, "faults": kill.faults} for kill in killed if kill.faults]
        print(json.dumps(counts))
        if asked.out:
            asked.out.write_text(
                json.dumps(counts | {"found": findings.faults, "killed": broken}, indent=1) + "\n", encoding="utf-8"
            )
        return bool(findings.faults or counts["kills_with_faults"])
    finally:
        ending.close()
        if not asked.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
