"""RidgeFill as a `torch.compile` backend."""
