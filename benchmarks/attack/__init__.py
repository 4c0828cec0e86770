"""Attacks on a fleet by strangers, clients and machine faults, one after another."""
