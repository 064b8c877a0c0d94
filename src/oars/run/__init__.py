"""A command line becomes N live ranks: plan, launch, supervise, exit codes."""
