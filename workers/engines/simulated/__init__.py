"""An engine without a model. Batching and timing are realistic; its tokens reveal any loss."""
