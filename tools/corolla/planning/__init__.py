"""What fits on this machine, how fast it will be, and why: the numbers behind `corolla plan` and `corolla init`."""
