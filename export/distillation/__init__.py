"""Knowledge distillation: a student is trained on the answers of a bundle."""

# Fields of JobOptions that are options of a distillation.
OF_JOB = ("source_language", "target_language", "chunk_rows", "max_errors")
