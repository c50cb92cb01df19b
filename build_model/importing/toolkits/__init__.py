"""Models of Marian and fairseq in their own formats; neither toolkit is needed."""
