"""The benchmark behind `make bench`: Plait beside its peers and beside the machine's limits."""
