"""Exports of imported folders are traced once for all tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _shared_traces(traces: None) -> None:
    """Exports and verifications of these tests share `TRACES`."""
