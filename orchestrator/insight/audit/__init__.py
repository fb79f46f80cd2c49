"""Does the sampler agree with the trainer? Samples, scores and attributes the gap (`troupe audit`)."""
