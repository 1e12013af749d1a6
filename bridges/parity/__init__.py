"""The main job: the same tokens' log-probabilities from an engine, a trainer and the JAX reference, compared in bits."""
