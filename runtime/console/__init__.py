"""The command line's building blocks: options, errors, progress. Used by cli.py alone."""
