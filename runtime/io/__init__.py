"""Files, folders and documents: read within limits, written whole or not at all."""
