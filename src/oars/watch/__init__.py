"""Looks at runs: reads run folders, and nothing else. What a rank or a supervisor does not write is not known here."""

VERBS = {  # see oars.watch.command
    "runs": "list the runs of this folder",
    "show": "draw a run's curves in the terminal",
    "compare": "draw several runs over each other",
    "report": "write an HTML page about runs",
    "explain": "say what of a run was split, what was not and why, and whether more ranks would gain",
    "board": "start TensorBoard on runs",
    "scale": "run a script on several numbers of ranks, and say how much faster it gets",
    "predict": "say how fast a training would be on a machine, and on how many ranks, you do not have",
    "evolve": "find the widths of a script's layers within a budget of FLOPs",
    "sweep": "run a script with many settings of its arguments, and say which did best",
}
