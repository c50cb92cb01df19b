"""Text in, results out in the same order: batching, replicas, and the tasks of an engine."""
