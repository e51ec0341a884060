"""Runs in which everything is decided by chance, or everything is tried in turn, and judges who see
only the evidence.

    evidence     what clients, handlers and the file itself saw
    timeline     the same, by job and claim
    invariants   what must be true of every run (row_, claim_ and run_invariants)

    processes    rounds with real processes (process_plan, _round, _evidence and _judge)
    child        one of them (child_handlers, child_client, diary); `fleet` has all, `disk` the file
"""
