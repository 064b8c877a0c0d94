"""Looks at runs: reads run folders, and nothing else. What a rank or a supervisor does not write is not known here."""
