"""Collectives between the ranks of one host, without sockets."""

from plait.worker.shared_memory.group import SharedMemoryGroup, join

__all__ = ["SharedMemoryGroup", "join"]
