"""A tensor with the global shape of which this rank holds its rows, and the rules of what operations do to it."""
