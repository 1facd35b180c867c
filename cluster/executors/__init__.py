"""How the ranks of a model are reached: in this process, in local processes, or on Ray."""
