"""An engine without a model: real batching, real timing, and tokens that prove that none was lost, doubled or altered."""
