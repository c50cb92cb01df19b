"""Knowledge distillation: a student is trained on the answers of a bundle."""
