"""Functions of RL libraries, with their arguments and results; each is imported by its own name."""
