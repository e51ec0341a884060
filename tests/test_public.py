"""Decisions of the package as a whole: public names, and which module may know what."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trio_jobs
import trio_jobs.testing
from trio_jobs import State

PACKAGE = Path(trio_jobs.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}

PUBLIC = {
    "Attempt",
    "Fail",
    "Failure",
    "Handler",
    "Job",
    "JobFailed",
    "JobNotFound",
    "Jobs",
    "Kind",
    "LeaseLost",
    "PastAttempt",
    "PayloadError",
    "Retry",
    "RetryLater",
    "Runner",
    "SqliteStore",
    "State",
    "StateError",
    "Statistics",
    "StoreBusy",
    "StoreError",
    "TrioJobsError",
    "constant",
    "exponential",
    "open_jobs",
    "quadratic",
    "run_once",
    "serve",
}

PUBLIC_IN_TESTING = {"EPOCH", "attempt", "run", "settled"}

MEMBERS: dict[type, set[str]] = {
    trio_jobs.Jobs: {
        "cancel",
        "counts",
        "enqueue",
        "enqueue_many",
        "enqueue_on",
        "find",
        "get",
        "history",
        "retry",
        "wait_finished",
    },
    trio_jobs.Job: {
        "attempt",
        "deadline",
        "enqueued_at",
        "failure",
        "finished_at",
        "id",
        "key",
        "kind",
        "priority",
        "result",
        "run_at",
        "started_at",
        "state",
        "to_dict",
        "unwrap",
    },
    trio_jobs.Attempt: {
        "job_id",
        "jobs",
        "kind",
        "number",
        "payload",
        "publish",
        "published",
        "token",
    },
}

FIELDS: dict[type, list[str]] = {
    trio_jobs.PastAttempt: ["number", "claim", "started_at", "ended_at", "outcome", "failure"],
    trio_jobs.Statistics: [
        "running",
        "started",
        "succeeded",
        "failed",
        "retried",
        "lost",
        "unhandled",
        "trouble",
    ],
    trio_jobs.Failure: ["message", "type"],
    trio_jobs.Retry: ["attempts", "backoff", "jitter"],
}

# A module imports only from the rows above its own.
LAYERS = [
    {"_errors", "_checks", "_identity", "_inotify", "_pace", "_repeats"},
    {"_model", "_codec", "_retry"},
    {"_instants"},
    {"_lifecycle", "_store", "_kinds", "_drivers", "_schema", "_statistics"},
    {"_clock", "_handler", "_hub", "_rows"},
    {"_writes", "_owners", "_agenda", "_probation"},
    {"_batch", "_claims", "_connections"},
    {"_bridge", "_checkpoints", "_job"},
    {"_lookout", "_unhandled", "_waiters", "sqlite"},
    {"_jobs"},
    {"_attempt"},
    {"_keeper", "_workers"},
    {"_ends"},
    {"_pool"},
    {"_engine"},
    {"_runner", "testing"},
    {"__init__"},
    {"_demo", "_work"},
    {"_display"},
    {"__main__"},
]

MAY_IMPORT_TRIO = {
    "__main__",
    "_attempt",
    "_bridge",
    "_clock",
    "_demo",
    "_ends",
    "_engine",
    "_hub",
    "_jobs",
    "_keeper",
    "_lookout",
    "_unhandled",
    "_waiters",
    "_pool",
    "_runner",
    "_work",
    "_workers",
    "testing",
}

every_module = pytest.mark.parametrize("module", MODULES)


# Names.


def public_names(module: types.ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_the_public_names_are_those_that_were_decided() -> None:
    assert public_names(trio_jobs) == PUBLIC


def test_the_public_names_of_testing_are_those_that_were_decided() -> None:
    assert set(trio_jobs.testing.__all__) == PUBLIC_IN_TESTING


@pytest.mark.parametrize("owner", MEMBERS, ids=lambda owner: owner.__name__)
def test_the_public_members_are_those_that_were_decided(owner: type) -> None:
    assert {name for name in dir(owner) if not name.startswith("_")} == MEMBERS[owner]


@pytest.mark.parametrize("owner", FIELDS, ids=lambda owner: owner.__name__)
def test_the_fields_of_public_values_are_those_that_were_decided(owner: type) -> None:
    assert list(inspect.signature(owner).parameters) == FIELDS[owner]


def test_the_states_are_the_six_words() -> None:
    assert [state.value for state in State] == [
        "queued",
        "running",
        "succeeded",
        "failed",
        "dead",
        "cancelled",
    ]
    assert all(state.name == state.value.upper() for state in State)


def test_every_error_of_the_library_derives_from_its_base() -> None:
    errors = {
        name
        for name in PUBLIC
        if isinstance(value := getattr(trio_jobs, name), type)
        and issubclass(value, trio_jobs.TrioJobsError)
    }

    assert errors == {
        "JobFailed",
        "JobNotFound",
        "LeaseLost",
        "PayloadError",
        "StateError",
        "StoreBusy",
        "StoreError",
        "TrioJobsError",
    }
    assert issubclass(trio_jobs.StoreBusy, trio_jobs.StoreError)
    assert issubclass(trio_jobs.PayloadError, ValueError)


def public_functions() -> Iterator[tuple[str, Callable[..., object]]]:
    for module, names in ((trio_jobs, PUBLIC), (trio_jobs.testing, PUBLIC_IN_TESTING)):
        for name in sorted(names):
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield name, value
            elif isinstance(value, type):
                for member, function in vars(value).items():
                    if isinstance(function, property):
                        function = function.fget
                    if name == "Retry" and member == "backoff":
                        continue  # the default of a field
                    if inspect.isfunction(function) and (
                        member in ("__init__", "__call__") or not member.startswith("_")
                    ):
                        yield f"{name}.{member}", function


FUNCTIONS = dict(public_functions())

# The function behind overloads is seen by no checker; a handler is of any payload and result,
# and what checks them is `handled_by`; a `Runner` is made by `serve`, and only by it.
MAY_SAY_ANY = {
    "Handler.__init__",
    "Handler.__call__",
    "Jobs.cancel",
    "Jobs.counts",
    "Jobs.find",
    "Jobs.get",
    "Jobs.history",
    "Jobs.retry",
    "Jobs.wait_finished",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_signatures_are_complete_and_say_no_Any(name: str) -> None:
    function = FUNCTIONS[name]
    hints = dict(inspect.get_annotations(function))
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]

    assert set(parameters) <= set(hints)
    assert "return" in hints
    if name not in MAY_SAY_ANY:
        assert not [hint for hint in hints.values() if re.search(r"\bAny\b", str(hint))]


@pytest.mark.parametrize("name", sorted(MAY_SAY_ANY))
def test_where_a_public_signature_says_Any_it_is_about_types_it_does_not_use(name: str) -> None:
    hints = inspect.get_annotations(FUNCTIONS[name])

    bare = [hint for hint in hints.values() if str(hint) in ("Any", "typing.Any")]
    assert not bare or name == "Handler.__call__"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_keyword_only_and_no_flag_is_positional(name: str) -> None:
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert not isinstance(parameter.default, bool)
            assert "bool" not in str(parameter.annotation)


# Their members are documented elsewhere: the promises of a store are those of `Store`, names
# of fields say what they are, and of a `Runner` a user sees what DESIGN names.
DOCUMENTED = [
    name
    for name in FUNCTIONS
    if "__" not in name and name.split(".")[0] not in ("SqliteStore", "Job", "Retry", "Runner")
]


@pytest.mark.parametrize(
    "name", [*sorted(PUBLIC), *DOCUMENTED, "Job.unwrap", "Job.to_dict", "Runner.drain"]
)
def test_everything_public_says_what_it_is_for(name: str) -> None:
    value = FUNCTIONS.get(name) or getattr(trio_jobs, name)

    assert (value.__doc__ or "").strip()
    assert not (value.__doc__ or "").startswith(f"{name}(")  # made by @dataclass


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


# Architecture.


def imports_of(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names of imported modules, and whether it is only for a type checker."""
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        is_typing = node in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, is_typing
        elif isinstance(node, ast.ImportFrom):
            if node.module == "trio_jobs":
                yield ".__init__", is_typing
            elif node.level == 0:
                yield node.module or "", is_typing
            elif node.module:
                yield f".{node.module}", is_typing
            else:
                for alias in node.names:
                    yield f".{alias.name}" if alias.name in MODULES else ".__init__", is_typing


def outside_imports(module: str) -> set[str]:
    return {
        name.split(".")[0] for name, _ in imports_of(MODULES[module]) if not name.startswith(".")
    }


def test_every_module_has_its_place() -> None:
    assert set().union(*LAYERS) == set(MODULES)


@every_module
def test_imports_go_one_way(module: str) -> None:
    level = next(index for index, layer in enumerate(LAYERS) if module in layer)
    below = set().union(*LAYERS[:level])

    inside = {
        name[1:]
        for name, is_typing in imports_of(MODULES[module])
        if name.startswith(".") and not is_typing
    }
    assert inside <= below


@every_module
def test_only_modules_with_tasks_import_trio(module: str) -> None:
    imported = "trio" in outside_imports(module)

    assert not imported or module in MAY_IMPORT_TRIO


@every_module
def test_nothing_but_the_sqlite_store_imports_randomness(module: str) -> None:
    sources = {"random", "uuid", "secrets"} & outside_imports(module)
    from_uuid = {
        alias.name
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.ImportFrom) and node.module == "uuid"
        for alias in node.names
    }

    # The codec knows UUID, the type; nobody makes one.
    allowed = {"sqlite": {"random"}, "_connections": {"random"}, "_codec": {"uuid"}}.get(
        module, set()
    )
    assert sources <= allowed
    assert from_uuid <= {"UUID"}
    assert "urandom" not in ast.unparse(MODULES[module])


@every_module
def test_sql_and_drivers_stay_behind_the_store(module: str) -> None:
    drivers = {"sqlite3", "apsw"} & outside_imports(module)

    assert not drivers or module in ("sqlite", "_drivers")


@every_module
def test_nothing_pickles_and_nothing_waits_for_asyncio(module: str) -> None:
    assert not {"pickle", "marshal", "shelve", "dill", "asyncio", "anyio"} & outside_imports(module)


CLOCKS = {
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.perf_counter",
    "time.process_time",
    "time.localtime",
    "time.gmtime",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "datetime.datetime.now",
}


def uses_of(tree: ast.AST, names: set[str]) -> set[str]:
    """Which of these dotted names occur; also when they are imported by name."""
    used = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            used |= {f"time.{alias.name}" for alias in node.names} & names
    return used


@every_module
def test_only_one_module_reads_a_clock(module: str) -> None:
    used = uses_of(MODULES[module], CLOCKS)

    assert used == ({"time.time"} if module == "_clock" else set())


@every_module
def test_only_the_lifecycle_assigns_a_state(module: str) -> None:
    assigned = {
        ast.unparse(keyword.value)
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "state"
    }

    allowed = {
        "_lifecycle": {"to"},
        # A row as it is read, and one that is new: queued. The claim goes by the table.
        "_rows": {"STATES[record[1]]"},
        "_writes": {"State.QUEUED"},
    }.get(module, set())
    if module in ("_demo", "__main__"):
        return  # they ask: `find(state=...)`
    assert assigned <= allowed


@every_module
def test_nothing_outside_the_store_and_the_command_prints_or_warns(module: str) -> None:
    called = {
        ast.unparse(node.func) for node in ast.walk(MODULES[module]) if isinstance(node, ast.Call)
    }

    assert "warnings.warn" not in called
    if module not in ("__main__", "_demo", "_work"):
        assert not called & {"print", "sys.stdout.write", "sys.stderr.write"}


@every_module
def test_every_module_says_first_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(MODULES[module])


def test_the_map_of_the_package_names_modules_that_exist_and_all_that_matter() -> None:
    source = (PACKAGE / "__init__.py").read_text()
    comments = "\n".join(line for line in source.splitlines() if line.startswith("#"))

    named = set(re.findall(r"\b_[a-z]+\b", comments)) | (
        {"sqlite"} if "sqlite" in comments else set()
    )
    assert named <= set(MODULES)
    assert set(MODULES) - named <= {
        "__init__",
        "__main__",
        "_checks",
        "_demo",
        "_display",
        "_errors",
        "_retry",
        "_work",
        "testing",
    }


def test_importing_the_package_needs_no_checker_and_no_second_driver() -> None:
    # typing_extensions only for a type checker, apsw only when that driver is chosen.
    for module, tree in MODULES.items():
        for name, is_typing in imports_of(tree):
            if name.split(".")[0] == "typing_extensions":
                assert is_typing, module
    top_level = {
        alias.name
        for tree in MODULES.values()
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "apsw" not in top_level


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_annotations_of_public_classes_can_be_evaluated(name: str) -> None:
    value = getattr(trio_jobs, name)

    if isinstance(value, type):
        assert set(typing.get_type_hints(value)) >= set(inspect.get_annotations(value))


def test_public_values_can_be_payloads_and_results_themselves() -> None:
    assert trio_jobs.Kind("report", trio_jobs.Failure, list[trio_jobs.PastAttempt])


def test_tracebacks_name_errors_as_they_are_imported() -> None:
    [last] = traceback.format_exception_only(trio_jobs.StoreBusy("locked"))

    assert last == "trio_jobs.StoreBusy: locked\n"


def test_generic_classes_can_be_parameterised_at_run_time() -> None:
    assert typing.get_origin(trio_jobs.Job[int]) is trio_jobs.Job
    assert typing.get_origin(trio_jobs.Kind[int, str]) is trio_jobs.Kind
    assert typing.get_origin(trio_jobs.Attempt[int, str]) is trio_jobs.Attempt
