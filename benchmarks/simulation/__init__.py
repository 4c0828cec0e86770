"""Are simulated engines, traces and replays like what they stand for?"""
