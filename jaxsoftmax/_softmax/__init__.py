"""softmax, log_softmax and logsumexp."""
