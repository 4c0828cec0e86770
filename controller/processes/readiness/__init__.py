"""When is a fleet that `holdfast up` starts there, and who is still awaited?"""
