"""What other libraries call, with their arguments and results; each is imported by its own name."""
