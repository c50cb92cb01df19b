"""Import of pretrained models; files that are missing, damaged or unsupported raise InputError."""
