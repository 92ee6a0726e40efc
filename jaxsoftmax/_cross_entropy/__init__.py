"""Softmax cross entropy, of integer labels and of probabilities."""
