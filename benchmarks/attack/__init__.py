"""What strangers, clients and machines may do to a fleet, one after another."""
