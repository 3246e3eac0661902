"""The families of algorithms: what rank 0 decides, what each rank does, the equations. None imports another."""
