"""How an unmodified script comes aboard: its framework, its files, its random numbers."""
