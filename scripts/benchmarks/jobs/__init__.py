"""Scripts that run under horovodrun: every arm and repetition of a case, one after the other in one job."""
