"""Chat: conversations as training data, a model's answers in a terminal, and how good they are."""
