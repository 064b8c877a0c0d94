"""What backward leaves behind: the same global gradients on every rank."""
