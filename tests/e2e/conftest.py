"""One server for all tests that do not harm it; the others start their own."""

from collections.abc import Iterator

import pytest
from plait_testing.server import Server, started

# Fewer seats than clients, so that requests wait in the queue too.
MAX_NUM_SEQS = 16


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo model over two ranks on the CPU."""
    with started(max_num_seqs=MAX_NUM_SEQS) as server:
        yield server
        assert server.stop() == 0
        assert server.left_behind() == []
