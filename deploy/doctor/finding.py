"""What the doctor says: one line each."""

from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but not as well as it could, or cannot be told
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` is the router's URL, a replica or a model; `mend` says what to do."""

    verdict: Verdict
    about: str
    what: str
    mend: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.mend}" if self.mend else ""
        return f"{self.verdict:7} {self.about}: {self.what}{remedy}"

    def record(self) -> dict[str, str]:
        return asdict(self)


def ok(about: str, what: str) -> Finding:
    return Finding(Verdict.OK, about, what)


def warning(about: str, what: str, mend: str = "") -> Finding:
    return Finding(Verdict.WARNING, about, what, mend)


def wrong(about: str, what: str, mend: str) -> Finding:
    return Finding(Verdict.WRONG, about, what, mend)
