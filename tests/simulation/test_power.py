"""Power cuts, and that their judge sees what it is there to see."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from . import power, power_disk, power_judge, power_life
from .power_disk import SECTOR, Disk, Image
from .power_facts import NOTHING
from .power_judge import Cut, cuts, judge
from .power_life import Life
from .power_store import Store, Synchronous
from .vfs import Create, Delete, Operation, Sync, Truncate, Write

OLD, NEW = b"o" * 4 * SECTOR, b"n" * 4 * SECTOR


@functools.cache
def script(synchronous: Synchronous) -> Life:
    return Life("script", synchronous=synchronous, is_script=True)


def violations(cuts: Iterator[Cut]) -> list[tuple[int, list[str]]]:
    """(position, what is wrong) of those with which something is."""
    judged = ((cut.position, judge(cut)[1]) for cut in cuts)
    return [(position, wrong) for position, wrong in judged if wrong]


# Lives that are cut.


@pytest.mark.parametrize("synchronous", ["full", "normal"])
def test_the_script_has_a_good_end_and_something_of_everything(synchronous: Synchronous) -> None:
    lived = script(synchronous)
    states = {row.state for row in power_judge.look_at(lived.left).rows}
    truncated = [one for one in lived.operations if isinstance(one, Truncate)]
    begun_anew = [one for one in lived.operations if isinstance(one, Write) and one.offset == 0]

    assert power_judge.wrong_at_end(lived) == []
    assert {state.value for state in states if state is not None} == {
        "succeeded",
        "failed",
        "dead",
        "cancelled",
    }
    assert truncated
    assert len(begun_anew) > 3  # the log, and pages that checkpoints have moved


@pytest.mark.parametrize("synchronous", ["full", "normal"])
def test_no_cut_of_the_script_loses_what_was_promised(synchronous: Synchronous) -> None:
    lived = script(synchronous)
    some = range(0, len(lived.operations) + 1, 4)  # the command takes every one
    found = violations(cuts(lived, "any", only=some))

    assert len(some) > 200
    assert found == []


def test_no_cut_of_a_short_life_loses_what_was_promised_whatever_survives() -> None:
    lived = Life("1")
    found = [violations(cuts(lived, draw)) for draw in ("one", "another")]

    assert len(lived.operations) > 150
    assert found == [[], []]


@pytest.mark.parametrize("synchronous", ["full", "normal"])
def test_life_goes_on_after_a_cut_and_after_a_second_one(synchronous: Synchronous) -> None:
    lived = script(synchronous)
    some = range(0, len(lived.operations) + 1, 500)
    verdicts = [
        wrong
        for cut in cuts(lived, "on", only=some)
        for wrong in power_judge.after(cut, f"on {cut.position}", again="once")
    ]

    assert len(verdicts) == 2 * len(some)
    assert [wrong for wrong in verdicts if wrong] == []


def test_recovery_may_be_cut_at_any_operation() -> None:
    lived = Life("6")
    [cut] = cuts(lived, "in the middle", only=[len(lived.operations) // 2])
    verdicts = list(power_judge.after(cut, "everywhere", again="everywhere"))

    assert len(verdicts) > 50
    assert [wrong for wrong in verdicts if wrong] == []


def test_what_was_under_way_at_one_cut_may_come_after_a_second_one() -> None:
    """The one seed whose cuts were ever found wrong: its judge was."""
    verdicts = list(power.run("207", 205, twice=True))

    assert len(verdicts) > 50
    assert [one.report() for one in verdicts if one.wrong] == []


def test_no_cut_of_a_life_by_chance_loses_what_was_promised() -> None:
    verdicts = list(power.run("1"))

    assert len(verdicts) > power.CUTS
    assert [one.report() for one in verdicts if one.wrong] == []


def test_a_life_and_its_cuts_can_be_had_again() -> None:
    lives = [Life("3") for _ in range(2)]
    known = [[(one.position, one.says) for one in lived.facts.facts] for lived in lives]
    commits = [[commit.digest for commit in lived.facts.commits] for lived in lives]
    position = len(lives[0].operations) // 2
    [alone] = cuts(lives[0], "same", only=[position])
    among_others = [cut for cut in cuts(lives[0], "same") if cut.position == position]

    assert known[0] == known[1]
    assert commits[0] == commits[1]
    assert among_others == [alone]


def test_the_record_of_a_life_is_whole() -> None:
    lived = script("full")
    model = Disk(lived.image, lived.files)
    for operation in lived.operations:
        model.apply(operation)
    for operation in lived.operations:
        if isinstance(operation, Create):
            model.apply(Sync(operation.file, operation.name, folder=True))

    assert model.after_cut(random.Random(0)) == lived.left


# The judge bites.


@pytest.mark.parametrize("synchronous", ["full", "normal"])
@pytest.mark.parametrize(
    "lie",
    [{"obeys": power_disk.no_sync}, {"obeys": power_disk.no_sync_of_the_log}, {"is_late": True}],
    ids=["no sync is obeyed", "none of the log", "syncs are late"],
)
def test_a_disk_that_lies_is_caught(lie: dict[str, Any], synchronous: Synchronous) -> None:
    lived = script(synchronous)
    some = range(0, len(lived.operations), 13)

    assert len(violations(cuts(lived, "lies", only=some, **lie))) > 5


def test_normal_is_not_full() -> None:
    """What was acknowledged last is lost, as its documentation says."""
    lived = script("normal")
    some = range(0, len(lived.operations), 5)
    as_if = [replace(cut, promised="full") for cut in cuts(lived, "as if", only=some)]
    found = violations(iter(as_if))

    assert len(found) > 5
    assert any("is gone" in text for _, wrong in found for text in wrong)


@pytest.mark.parametrize("setting", ["off", "normal"])
def test_a_store_that_does_not_sync_is_caught(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(Store):
        def open(self) -> None:
            vars(self._connections)["_synchronous"] = setting
            super().open()

    monkeypatch.setattr(power_life, "Store", Careless)
    lived = Life("5")
    some = range(0, len(lived.operations), 4)
    found = violations(cuts(lived, "careless", only=some))

    assert any("is gone" in text for _, wrong in found for text in wrong)


def test_a_violation_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(power_judge, "judge", lambda cut: (NOTHING, ["all is lost"]))
    told = CliRunner().invoke(power.main, ["--seed", "5", "--cut", "40"])

    assert told.exit_code == 1
    assert "\n  40: " in told.output
    assert (
        "broken promises, 1 in all:\n  all is lost\n"
        "again: python -m tests.simulation power --seed 5 --cut 40\n"
    ) in told.output


def test_who_is_told_before_the_commit_is_told_too_early() -> None:
    lived = Life("4")
    lived.facts.facts = [
        replace(fact, position=max(0, fact.position - 10)) for fact in lived.facts.facts
    ]
    found = violations(cuts(lived, "early"))

    assert any("is gone" in text for _, wrong in found for text in wrong)
    assert any("but now is" in text for _, wrong in found for text in wrong)


def test_jobs_of_one_call_in_two_transactions_are_caught() -> None:
    lived = Life("4")
    ids = [row.id for row in power_judge.look_at(lived.left).rows]
    lived.facts.groups = [[ids[0], ids[-1]]]
    found = violations(cuts(lived, "groups"))

    assert any("only" in text for _, wrong in found for text in wrong)


def test_a_file_that_is_at_no_commit_is_caught() -> None:
    lived = Life("4")
    *_, end = cuts(lived, "part")
    del lived.facts.commits[-1]
    wrong = judge(replace(end, image=lived.left))[1]

    assert wrong[0].startswith("the file is at no commit")


# The disk.


def after_cuts(*operations: Operation, image: Image | None = None) -> list[Image]:
    """What may be left after these, on a disk that has these files to begin with."""
    start = {"file": OLD} if image is None else image
    model = Disk(start, {name: number for number, name in enumerate(start)})
    for operation in operations:
        model.apply(operation)
    return [model.after_cut(random.Random(seed)) for seed in range(300)]


def test_what_was_synced_survives() -> None:
    images = after_cuts(Write(0, 0, NEW), Sync(0, "file", False))

    assert images == [{"file": NEW}] * len(images)


def test_of_what_was_not_each_sector_may_survive_alone() -> None:
    contents = {image["file"] for image in after_cuts(Write(0, 0, NEW))}
    old, new = OLD[:SECTOR], NEW[:SECTOR]

    assert {OLD, NEW, old + new + old + new, new + old + old + old} <= contents


def test_a_sector_may_be_torn_but_nothing_beside_what_was_written() -> None:
    contents = {image["file"] for image in after_cuts(Write(0, 100, NEW[:200]))}
    torn = contents - {OLD, OLD[:100] + NEW[:200] + OLD[300:]}

    assert torn
    assert {(one[:100], one[300:]) for one in contents} == {(OLD[:100], OLD[300:])}


def test_a_later_write_may_survive_without_an_earlier_one() -> None:
    images = after_cuts(Write(0, 0, NEW), Truncate(0, SECTOR), Write(0, 0, b"last"))

    assert {"file": b"last" + OLD[4:]} in images
    assert {"file": NEW[:SECTOR]} in images


def test_a_write_beyond_the_end_may_leave_a_hole() -> None:
    images = after_cuts(Write(0, 0, NEW), image={"file": b""})

    assert {"file": bytes(3 * SECTOR) + NEW[:SECTOR]} in images


def test_a_name_comes_and_goes_for_good_when_the_folder_is_synced() -> None:
    changes: list[Operation] = [Create("new", 7), Delete("file")]
    unsure = after_cuts(*changes)
    sure = after_cuts(*changes, Sync(7, "new", True))

    assert {frozenset(image) for image in unsure} == {
        frozenset(names) for names in [(), ("file",), ("new",), ("file", "new")]
    }
    assert sure == [{"new": b""}] * len(sure)


def test_an_operation_under_way_may_have_been_done_but_not_a_sync() -> None:
    model = Disk({"file": OLD}, {"file": 0})
    writing = {model.after_cut(random.Random(n), Write(0, 0, NEW))["file"] for n in range(100)}
    model.apply(Write(0, 0, NEW))
    syncing = {model.after_cut(random.Random(n), Sync(0, "", True))["file"] for n in range(100)}

    assert {OLD, NEW} <= writing
    assert {OLD, NEW} <= syncing
