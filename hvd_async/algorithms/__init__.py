"""Families of algorithms: what rank 0 decides, what each rank does, and the equations. No family imports another."""
