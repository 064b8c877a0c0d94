"""A rank was lost: its part of the step is computed again by the others."""
