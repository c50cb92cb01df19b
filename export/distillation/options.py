"""Options of a distillation, by what they belong to."""

CORPUS = ("source", "target", "pairs")
# Fields of SessionOptions and of JobOptions that are options of a distillation.
SESSION = ("runtime", "provider", "threads", "optimisation")
OF_JOB = ("source_language", "target_language", "chunk_rows", "max_errors")
# Fields of ModelConfig that are none: a student is an encoder-decoder, sized by its tokenizer.
NOT_OF_STUDENT = ("vocabulary_size", "architecture")
