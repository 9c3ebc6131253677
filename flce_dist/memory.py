"""Memory on each GPU from which the other ranks of a group copy: how much, and giving it back."""

from flce_dist.parallel.transport import release_shared_memory, shared_bytes

__all__ = ["release_shared_memory", "shared_bytes"]
