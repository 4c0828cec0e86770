"""Which worker a request should go to: the endpoints, what they have cached, how much they have to do."""
