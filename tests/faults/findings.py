"""What a campaign has found: counted, and told as a table."""

from collections import Counter
from dataclasses import dataclass, field

from case import Case
from kills import Killed
from oracle import Verdict
from workers import Ended


@dataclass
class Findings:
    """What the campaign has seen so far."""

    cases: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    subjects: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)
    real: int = 0
    seconds: float = 0.0

    def add(self, case: Case, end: Ended, verdicts: list[Verdict], real: bool) -> None:
        """Count a case, and print what is wrong with it."""
        self.cases += 1
        self.real += real
        self.codes[end.code] += 1
        self.subjects[case.subject] += 1
        for verdict in verdicts:
            self.kinds[verdict.kind] += 1
            self.faults.append({"kind": verdict.kind, "case": str(case), "seen": verdict.seen})
            print(f"{verdict.kind.upper()} {str(case)[:500]}\n    {verdict.seen}", flush=True)


def table(findings: Findings, killed: list[Killed]) -> str:
    """What was found, for people."""
    rows = [("cases", findings.cases), ("of them real processes", findings.real)]
    rows += [(f"on {name}", number) for name, number in sorted(findings.subjects.items())]
    rows += [(f"exit {code}", number) for code, number in sorted(findings.codes.items())]
    rows += [(f"found: {kind}", number) for kind, number in sorted(findings.kinds.items())]
    rows += [("kills", len(killed)), ("of them streamed", sum(kill.streamed for kill in killed))]
    rows += [("of them conversions", sum(kill.converts for kill in killed))]
    rows += [("kills that differ or leave things", sum(bool(kill.faults) for kill in killed))]
    return "\n".join(f"{name:40}{number:>8,}" for name, number in rows)
