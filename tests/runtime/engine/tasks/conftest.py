"""Fixtures of the tests of tasks."""

from tests.runtime.engine.tasks.loopback import pickled as pickled
