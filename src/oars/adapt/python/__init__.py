"""What ranks share of Python itself: clock, random numbers, imports, windows of figures."""
