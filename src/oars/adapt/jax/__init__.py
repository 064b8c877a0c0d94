"""JAX, with Keras or without: gradients, collectives inside compiled functions, and steps that are done again."""
