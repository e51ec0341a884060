"""Runs in which everything is decided by chance, or everything is tried in turn, and judges who see
only the evidence.

What is known of a run, and what must be true of it, whoever made it:

    evidence     what clients, handlers and the file itself saw
    timeline     the same, by job and claim
    invariants   what must be true of every run (row_, claim_, limit_, time_ and run_)

Simulated processes, in virtual time:

    plan         all that a seed decides, as data; `flavours` that are about one thing
    world        processes with clocks, connections and fates of their own on one real file
    store        the real store, with its seams in the world's hands; `latency` its thread
    faults       what can go wrong with a statement; `witness` hears what the library logs
    handlers     what jobs do; `clients` what is asked for
    runs         one run: chaos, healing, and the verdict; `many` of them in several processes
    work         counts what a run does, and breaks off one without an end
    visits       what is asked for when all is healed
    coverage     which rare ways a run went
    shrink       makes a failing plan small; `report` prints it; `kept` has those of the past
    sweep        every fault in turn, over one script
    mutants      small mistakes in a copy of the library, to see whether they are found

The commands are in `__main__`, `sweep`, `power`, `processes` and `mutants`; `options` has what they
share, and `progress` says how far they are.

Power cuts:

    vfs          records what reaches the disk
    power_disk   what of it is left after a cut
    power_life   what goes on between two cuts
    power_store  the store of a process, and its folder
    power_facts  what was told to somebody, and may not be denied by what is left
    power_judge  a life that is cut, and what must be true then
    power        the command

Real processes:

    processes    rounds with them (process_plan, _round, _evidence and _judge)
    child        one of them (child_handlers, child_client, diary); `fleet` has all, `disk` the file
"""
