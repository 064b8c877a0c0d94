"""What gradients do between ranks. Knows flat buffers, not models."""
