"""The seeds that ever failed, each with what it found. They run on every push.

When the drawing of plans changes, a seed means another plan. So what one finds in the library
also gets a test of its own. `KEPT` were found before plans had flavours, and mean what
`draw_ordinary` makes of them, which has drawn the same ever since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KEPT: Final[Mapping[int, str]] = {
    50: "a judge: a claim whose commit was unknown is not in the hands of whoever stops then",
    635: "a judge: a long reader explains a warning about the log",
    775: "a judge: what `run_once` could not write, it gave up before the stop",
    105736: "the world: healing sets clocks, which is a step of them",
    111772: "a judge: a renewal that waited for the lock has less of its lease left",
}

KEPT_WITH_FLAVOUR: Final[Mapping[int, str]] = {
    200438: "the world: a call in the instant in which the disk is there again is hindered",
    3006111: "a lost row that was given back without a start let others start as if it were proven",
    3029311: "the same",
    3034489: "the same",
    7004102: "a lost row that waited for its start counted as proven by time",
    2002399: "a judge: the news of an end was under way when somebody began to wait for the job",
    1009524: "a judge: a lost row whose payload does not decode is proven without a start",
    1013249: "a judge: whose clock is wrong ends a claim, and a third process starts the job again",
    201738: "the world: a poison job took the healer with it, and nobody was there for the visits",
}
