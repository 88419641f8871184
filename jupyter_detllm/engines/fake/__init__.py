"""An engine without a model, for tests and for learning."""
