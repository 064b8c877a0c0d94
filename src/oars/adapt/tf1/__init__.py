"""TensorFlow 1.x scripts on today's TensorFlow (``--tf1``): old names, sessions, graphs that are cut in stages."""
