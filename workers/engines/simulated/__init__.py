"""An engine without a model: real batching and timing, and tokens that reveal loss or alteration."""
