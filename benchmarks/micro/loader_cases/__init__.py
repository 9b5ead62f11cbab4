"""Whether `SharedMemoryLoader` keeps what it promises: see `__main__`."""
