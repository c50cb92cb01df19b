"""Options of the smallest training."""

# The smallest model that is one.
SMALLEST = [
    *("--preset=tiny", "--d-model=16", "--heads=2", "--d-ff=16"),
    *("--encoder-layers=1", "--decoder-layers=1", "--device=cpu", "--valid-sentences=4"),
]
# Long enough to be interrupted, and saved at every step.
ENDLESS = ["--max-steps=1000000", "--save-every=1", "--validate-every=1000000"]
