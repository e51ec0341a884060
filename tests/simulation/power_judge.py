"""A life that is cut, and what must be true after it.

A file that is found after a cut must be intact, be exactly at one of the commits there were,
and deny nothing that was known for certain. With `synchronous="full"` that is everything
anybody was told. With "normal" it is what was told before the last sync of the log that came
back. Then the next life begins on that file. It must be able to end every job, and may be cut
as well.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import apsw

from .power_disk import Disk, Image, Obeys, every_sync
from .power_facts import NOTHING, Contents, Fact, contents_of, torn, untrue
from .power_life import FILE, Life
from .power_store import Synchronous, folder_with
from .vfs import INDEX_SUFFIX, Operation, Sync

Again: TypeAlias = Literal["no", "once", "everywhere"]


@dataclass(frozen=True)
class Cut:
    """The power fails while an operation is under way; it has made nothing sure."""

    life: Life
    position: int
    image: Image
    promised: Synchronous

    @property
    def sure_until(self) -> int:
        """What was known at this position may not be denied."""
        if self.promised == "full":
            return self.position
        syncs = (
            position
            for position, operation in enumerate(self.life.operations[: self.position])
            if isinstance(operation, Sync) and operation.name.endswith("-wal")
        )
        return max(syncs, default=0)

    @property
    def facts(self) -> list[Fact]:
        """What must still be true."""
        return self.life.facts.known_at(self.sure_until, self.position)


def cuts(
    life: Life,
    chance: str,
    *,
    only: Collection[int] | None = None,
    obeys: Obeys = every_sync,
    is_late: bool = False,
) -> Iterator[Cut]:
    """One cut at every operation of a life, or at some of them, and one after the last.

    What survives is up to `chance` and the position, so each can be had again alone.
    """
    disk = Disk(life.image, life.files, obeys=obeys, is_late=is_late)
    under_way: list[Operation | None] = [*life.operations, None]
    for position, operation in enumerate(under_way):
        if only is None or position in only:
            image = disk.after_cut(random.Random(f"{chance} {position}"), operation)
            index = _left_of_index(random.Random(f"{chance} {position} index"))
            yield Cut(life, position, {**image, **index}, life.synchronous)
        if operation is not None:
            disk.apply(operation)


def _left_of_index(chance: random.Random) -> Image:
    """The index of the log is shared memory in a file that nobody ever syncs: anything may be
    left of it, and nothing may depend on it."""
    size = chance.choice([0, 32_768])
    content = chance.choice([None, bytes(size), chance.randbytes(size)])
    return {} if content is None else {FILE + INDEX_SUFFIX: content}


def judge(cut: Cut) -> tuple[Contents, list[str]]:
    """What is found after the cut, and what is wrong with it."""
    try:
        contents = look_at(cut.image)
    except (apsw.Error, UnicodeDecodeError) as error:
        return NOTHING, [f"the file cannot be read: {error}"]
    if contents.integrity != "ok":
        return contents, [f"integrity_check: {contents.integrity}"]
    wrong = _wrong_commit(cut, contents)
    wrong += torn(cut.life.facts.groups, contents.rows)
    return contents, [*wrong, *untrue(cut.facts, contents.rows)]


def look_at(image: Image) -> Contents:
    """What SQLite makes of the files, by itself and with its own file system."""
    with folder_with(image) as folder:
        connection = apsw.Connection(os.path.join(folder, FILE))
        try:
            return contents_of(connection)
        finally:
            connection.close()


def _wrong_commit(cut: Cut, contents: Contents) -> list[str]:
    commits = cut.life.facts.commits
    digests = [commit.digest for commit in commits]
    newest = _completed(cut)
    sure_until = cut.sure_until
    oldest = sum(commit.position <= sure_until for commit in commits) - 1
    if contents.digest == cut.life.unfinished and oldest == 0:
        return []
    if contents.digest not in digests:
        return ["the file is at no commit: something of a transaction, or of two, is missing"]
    # Nothing was said yet of the one that is under way, and it may have come through.
    found = digests.index(contents.digest)
    if oldest <= found <= newest:
        return []
    return [f"the file is at commit {found} of {newest}, not at {oldest} or a later one"]


def _completed(cut: Cut) -> int:
    return sum(commit.position <= cut.position for commit in cut.life.facts.commits)


def live_on(cut: Cut, contents: Contents, chance: str) -> Life:
    """The life that begins when the power is back: soon or late, or with a clock gone wrong."""
    went_out_at = max(
        commit.at for commit in cut.life.facts.commits if commit.position <= cut.position
    )
    unfinished = cut.life.facts.commits[_completed(cut) :]
    later = random.Random(f"later {chance}").choice([-2, 0, 1, 30])
    return Life(
        chance,
        synchronous=cut.life.synchronous,
        image=cut.image,
        start=contents,
        unfinished=unfinished[0].digest if unfinished else None,
        earlier=[fact.carried() for fact in cut.facts],
        began_at=max(0, went_out_at + later),
        boot=cut.life.boot + 1,
    )


def after(cut: Cut, chance: str, *, again: Again) -> Iterator[list[str]]:
    """Judge a cut, and the life after it to its end; and then that life cut again, at one of its
    operations or at each. Gives what is wrong, once for each cut."""
    contents, wrong = judge(cut)
    if wrong:
        yield wrong
        return
    try:
        life = live_on(cut, contents, chance)
    except Exception:
        yield [f"in the life after it: {traceback.format_exc()}"]
        return
    yield [f"in the life after it: {one}" for one in wrong_at_end(life)]
    if again == "no":
        return
    chosen = random.Random(chance).randint(0, len(life.operations))
    for second in cuts(life, chance, only=[chosen] if again == "once" else None):
        if second.position == chosen:
            verdicts = after(second, f"{chance} again", again="no")
        else:
            verdicts = iter([judge(second)[1]])
        for wrong in verdicts:
            yield [f"after a second cut, at {second.position}: {one}" for one in wrong]


def wrong_at_end(life: Life) -> list[str]:
    """A life that ends in good order is like one with a cut that loses nothing."""
    end = Cut(life, len(life.operations), life.left, "full")
    return [*life.facts.wrong, *judge(end)[1]]
