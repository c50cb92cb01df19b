"""Parts that families of models add to the papers: one module each, with fields and code."""
