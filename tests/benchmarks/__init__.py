"""How fast it is: beside bare Trio, bare SQLite and other queues, in one interleaved run.

    python -m tests.benchmarks [NAMES...] [--quick | --full]

rounds      cases, their interleaved rounds, medians and ratios (pure but for the calls)
files       a fresh file, a connection to it, and rows by the hundred thousand
ours        what is measured of trio_jobs in this process
processes   what is measured of it in other processes
bare        the yardsticks: Trio alone, SQLite alone
floor       SQLite in a thread beside Trio: what any library of this kind pays
peers       the same work by SqliteHuey, litequeue and persist-queue
plan        which cases belong to which name, and how long they take
figures     the table of figures to reach
report      tables and the JSON file
plot        the picture
"""
