"""The k largest probabilities of a softmax."""
