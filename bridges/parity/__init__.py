"""The main job: the same tokens' log-probabilities from engine, trainer and JAX reference, compared in bits."""
