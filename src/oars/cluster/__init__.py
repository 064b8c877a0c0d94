"""Where ranks can live: on this machine, on hosts the user names, on what a scheduler gave this job.

One small file per batch scheduler, listed in ``place.SCHEDULERS``, all with a ``NAME`` and the same three functions:
``inside()``, whether this process is in one of its jobs; ``hosts()``, that job's hosts and how many ranks each is to
take; ``reach()``, the command that starts a program on one of them, before the host's name and the program.
"""
