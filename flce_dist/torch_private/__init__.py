"""Private names of torch: what each is for, and what happens in a torch that no longer has it.

No other folder of the library uses one. A missing one costs only what it is for: they are looked up
when they are needed, or have a default.
"""
