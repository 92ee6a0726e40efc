"""The kernel of the loss of `hidden @ weight`."""
